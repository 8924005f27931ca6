{{/* The security context of every pod of the release. */}}
{{- define "stagemesh.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# Volumes with large models are not walked at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* The security context of every container of the release. Argument: the capabilities to add, a list. */}}
{{- define "stagemesh.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{/* The writable volumes below a read-only root file system. Argument: the root. */}}
{{- define "stagemesh.scratchVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.scratch.tmp | quote }}
- name: home
  emptyDir:
    sizeLimit: {{ .Values.scratch.home | quote }}
{{- end -}}

{{- define "stagemesh.scratchMounts" -}}
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /var/lib/stagemesh
{{- end -}}

{{/*
The volume of /etc/stagemesh: annotations of the pod as files, the component's certificate in the folder tls, and keys of
further secrets. Arguments: (list root component files [secrets]), with the annotation of each file, and the name, the
folder and the keys of each secret. Kubernetes cannot mount a volume below another read-only one, so all are one projected
volume.
*/}}
{{- define "stagemesh.configVolume" -}}
{{- $root := index . 0 -}}
{{- $items := list -}}
{{- range $path, $annotation := index . 2 -}}
  {{- $items = append $items (dict "path" $path "fieldRef" (dict "apiVersion" "v1" "fieldPath" (printf "metadata.annotations['stagemesh.dev/%s']" $annotation))) -}}
{{- end -}}
{{- $secrets := list -}}
{{- if $root.Values.tls.enabled -}}
  {{- $secrets = list (dict "name" (include "stagemesh.tlsSecret" (list $root (index . 1))) "folder" "tls/" "keys" (include "stagemesh.tlsKeys" (list $root (index . 1)) | fromJsonArray)) -}}
{{- end -}}
{{- if gt (len .) 3 -}}
  {{- $secrets = concat $secrets (index . 3) -}}
{{- end -}}
- name: config
  {{- if $secrets }}
  projected:
    # 0440 in octal.
    defaultMode: 288
    sources:
      {{- with $items }}
      - downwardAPI:
          items:
            {{- toYaml . | nindent 12 }}
      {{- end }}
      {{- range $secret := $secrets }}
      - secret:
          name: {{ $secret.name | quote }}
          items:
            {{- range $key := $secret.keys }}
            - key: {{ $key }}
              path: {{ $secret.folder }}{{ $key }}
            {{- end }}
      {{- end }}
  {{- else }}
  downwardAPI:
    items:
      {{- toYaml $items | nindent 6 }}
  {{- end }}
{{- end -}}

{{/*
The environment of a container: the chart's variables, then the user's, which replace the chart's of the same name.
Arguments: (list root env own), with the user's list `env` and the container's own further variables `own`.
*/}}
{{- define "stagemesh.env" -}}
{{- $root := index . 0 -}}
{{- $env := index . 1 | default list -}}
{{- $chart := list
  (dict "name" "POD_NAME" "valueFrom" (dict "fieldRef" (dict "apiVersion" "v1" "fieldPath" "metadata.name")))
  (dict "name" "STAGEMESH_ZONE" "valueFrom" (dict "fieldRef" (dict "apiVersion" "v1" "fieldPath" "spec.nodeName")))
  (dict "name" "STAGEMESH_HOME" "value" "/var/lib/stagemesh")
  (dict "name" "HOME" "value" "/var/lib/stagemesh")
  (dict "name" "USER" "value" "stagemesh")
  (dict "name" "XDG_CACHE_HOME" "value" "/var/lib/stagemesh/cache")
-}}
{{- with $root.Values.otlp.endpoint -}}
  {{- $chart = concat $chart (list
    (dict "name" "OTEL_EXPORTER_OTLP_ENDPOINT" "value" .)
    (dict "name" "OTEL_TRACES_SAMPLER" "value" "parentbased_traceidratio")
    (dict "name" "OTEL_TRACES_SAMPLER_ARG" "value" (toString $root.Values.otlp.sampleRatio))
  ) -}}
{{- end -}}
{{- $names := list -}}
{{- range $env -}}
  {{- $names = append $names .name -}}
{{- end -}}
{{- $all := list -}}
{{- range concat $chart (index . 2) -}}
  {{- if not (has .name $names) -}}
    {{- $all = append $all . -}}
  {{- end -}}
{{- end -}}
{{- toYaml (concat $all $env) -}}
{{- end -}}

{{/*
The part of a pod's specification that says where and as whom it runs.
Arguments: (list root settings selector serviceAccountName), with the labels by which topology constraints count pods.
*/}}
{{- define "stagemesh.placement" -}}
{{- $root := index . 0 -}}
{{- $settings := index . 1 -}}
serviceAccountName: {{ index . 3 | quote }}
# No process of Stagemesh calls the Kubernetes API.
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "stagemesh.podSecurity" $root | nindent 2 }}
terminationGracePeriodSeconds: {{ include "stagemesh.gracePeriod" $settings }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with get $settings $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with get $settings $key }}
{{ $key }}: {{ . | quote }}
{{- end }}
{{- end }}
{{- with $settings.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $labels := dict "labelSelector" (dict "matchLabels" (index $ 2 | fromYaml)) }}
  {{- list (merge (deepCopy .) $labels) | toYaml | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/*
The time in seconds that a pod has to end. A process ends at most 25 seconds after its drain, and needs a margin.
Argument: the settings of the pod.
*/}}
{{- define "stagemesh.gracePeriod" -}}
{{- int64 .terminationGracePeriodSeconds | default (add .drainSeconds 30) -}}
{{- end -}}

{{/* A gRPC probe of a health name. Arguments: (list port service period timeout failures). */}}
{{- define "stagemesh.probe" -}}
grpc:
  port: {{ int64 (index . 0) }}
  service: {{ index . 1 | quote }}
periodSeconds: {{ int64 (index . 2) }}
timeoutSeconds: {{ int64 (index . 3) }}
failureThreshold: {{ int64 (index . 4) }}
{{- end -}}

{{/* A rolling update that starts new pods before it stops old ones. Argument: the surge. */}}
{{- define "stagemesh.strategy" -}}
type: RollingUpdate
rollingUpdate:
  # Kubernetes stops an old pod only when a new one is ready. Readiness of a new generation waits for all stages.
  maxUnavailable: 0
  maxSurge: {{ int64 . }}
{{- end -}}

{{/* A PodDisruptionBudget. Arguments: (list root name budget selector component group...). */}}
{{- define "stagemesh.disruptionBudget" -}}
{{- $budget := index . 2 -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "stagemesh.metadata" (concat (list (index . 0) (index . 1) dict) (slice . 4)) | nindent 2 }}
spec:
  {{- if hasKey $budget "minAvailable" }}
  minAvailable: {{ include "stagemesh.intOrPercent" $budget.minAvailable }}
  {{- else }}
  maxUnavailable: {{ include "stagemesh.intOrPercent" $budget.maxUnavailable }}
  {{- end }}
  selector:
    matchLabels:
      {{- index . 3 | nindent 6 }}
{{- end -}}

{{- define "stagemesh.intOrPercent" -}}
{{- if kindIs "string" . }}{{ quote . }}{{ else }}{{ int64 . }}{{ end -}}
{{- end -}}
