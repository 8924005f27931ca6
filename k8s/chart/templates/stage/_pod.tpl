{{/* The key of modelCache that selects the volume, or nothing. Argument: the model cache. */}}
{{- define "stagemesh.cacheSource" -}}
{{- $cache := . -}}
{{- if not $cache.none -}}
  {{- range $key := list "existingClaim" "claim" "hostPath" -}}
    {{- if get $cache $key -}}{{ $key }}{{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/*
The init container that fills the model cache. Arguments: (list root plan group). It learns the model and the revision of
each stage of the pod from its environment.
*/}}
{{- define "stagemesh.cacheInit" -}}
{{- $root := index . 0 -}}
{{- $plan := index . 1 -}}
{{- $group := index . 2 -}}
{{- $init := $group.modelCache.init -}}
{{- $own := list -}}
{{- range $name := $group.stages -}}
  {{- $stage := get $plan.stages $name -}}
  {{- $suffix := $name | upper | replace "-" "_" -}}
  {{- $own = append $own (dict "name" (printf "MODEL_%s" $suffix) "value" ($stage.entry.model | default "")) -}}
  {{- $own = append $own (dict "name" (printf "MODEL_REVISION_%s" $suffix) "value" ($stage.modelRevision | default "")) -}}
{{- end -}}
- name: model-cache
  image: {{ $init.image | quote }}
  {{- with $init.command }}
  command:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $init.args }}
  args:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  env:
    {{- include "stagemesh.env" (list $root $init.env $own) | nindent 4 }}
  {{- with $init.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $init.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "stagemesh.containerSecurity" list | nindent 4 }}
  volumeMounts:
    {{- include "stagemesh.scratchMounts" $root | nindent 4 }}
    - name: models
      mountPath: /var/lib/stagemesh/models
{{- end -}}

{{/*
The pod template of a group: one container for each stage. Arguments: (list root plan groupName tier component). The tier
is serving or warm. The component is stage, or worker for the other nodes of a stage that spans nodes.
*/}}
{{- define "stagemesh.stagePod" -}}
{{- $root := index . 0 -}}
{{- $plan := index . 1 -}}
{{- $name := index . 2 -}}
{{- $tier := index . 3 -}}
{{- $component := index . 4 -}}
{{- $group := get $plan.groups $name -}}
{{- $source := include "stagemesh.cacheSource" $group.modelCache -}}
metadata:
  labels:
    {{- include "stagemesh.podLabels" (list $root $plan.generation $group.podLabels $component $name) | nindent 4 }}
    stagemesh.dev/tier: {{ $tier }}
    {{- range $group.stages }}
    {{ include "stagemesh.stageLabel" . }}
    {{- end }}
  annotations:
    # A pod reads its own pipeline from this, so that a pod of an older ReplicaSet keeps the older one.
    stagemesh.dev/pipeline: |
      {{- include "stagemesh.pipelineFile" (include "stagemesh.stagePipeline" (list $root $group) | fromJson) | nindent 6 }}
    {{- with include "stagemesh.tlsChecksum" $root }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with include "stagemesh.annotations" (list $root $group.podAnnotations) }}
    {{- . | nindent 4 }}
    {{- end }}
spec:
  {{- $selector := include "stagemesh.selector" (list $root $component $name) }}
  {{- $account := include "stagemesh.serviceAccountName" (list $root $name $group.serviceAccount) }}
  {{- include "stagemesh.placement" (list $root $group $selector $account) | nindent 2 }}
  {{- $initialized := and $source $group.modelCache.init.image }}
  {{- if or $initialized $group.initContainers }}
  initContainers:
    {{- if $initialized }}
    {{- include "stagemesh.cacheInit" (list $root $plan $group) | nindent 4 }}
    {{- end }}
    {{- with $group.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    {{- range $stageName := $group.stages }}
    {{- include "stagemesh.stageContainer" (list $root $plan $group $stageName $tier $component) | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "stagemesh.configVolume" (list $root $name (dict "pipeline.yaml" "pipeline")) | nindent 4 }}
    {{- include "stagemesh.scratchVolumes" $root | nindent 4 }}
    - name: shm
      emptyDir:
        medium: Memory
        # The arenas of the pod's stages, and the shared memory of their engines.
        sizeLimit: {{ printf "%d" (int64 $group.shmBytes) | quote }}
    {{- if $source }}
    - name: models
      {{- if eq $source "hostPath" }}
      hostPath:
        path: {{ $group.modelCache.hostPath | quote }}
        type: Directory
      {{- else }}
      persistentVolumeClaim:
        claimName: {{ $group.modelCache.existingClaim | default (printf "%s-%s-models" (include "stagemesh.fullname" $root) $name) | quote }}
      {{- end }}
    {{- end }}
    {{- with $group.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The time after which a rollout counts as stuck. New pods wait until every stage has loaded. Argument: the plan. */}}
{{- define "stagemesh.progressDeadline" -}}
{{- $longest := 0 -}}
{{- range $name, $stage := .stages -}}
  {{- $longest = max $longest $stage.loadSeconds -}}
{{- end -}}
{{- add $longest 600 -}}
{{- end -}}
