{{/* The environment of a stage's container: caches of compilers, UCX, and the user's variables. Arguments: (list root stage). */}}
{{- define "stagemesh.stageEnv" -}}
{{- $root := index . 0 -}}
{{- $stage := index . 1 -}}
{{- $own := list
  (dict "name" "VLLM_CACHE_ROOT" "value" "/var/lib/stagemesh/cache/vllm")
  (dict "name" "TRITON_CACHE_DIR" "value" "/var/lib/stagemesh/cache/triton")
  (dict "name" "TORCHINDUCTOR_CACHE_DIR" "value" "/var/lib/stagemesh/cache/inductor")
-}}
{{- $ucx := dict -}}
{{- if $stage.nixl -}}
  {{- $_ := set $ucx "UCX_TCP_PORT_RANGE" $root.Values.networkPolicy.ucxPortRange -}}
{{- end -}}
{{- if $stage.rdma.gpuDirect -}}
  {{- /* Fails at the start rather than copying through the host's memory in silence. */ -}}
  {{- $_ := set $ucx "UCX_IB_GPU_DIRECT_RDMA" "yes" -}}
{{- end -}}
{{- range $name, $value := merge (deepCopy $stage.ucx) $ucx -}}
  {{- $own = append $own (dict "name" $name "value" (include "stagemesh.text" $value)) -}}
{{- end -}}
{{- include "stagemesh.env" (list $root $stage.env $own) -}}
{{- end -}}

{{/* The resources of a stage's container: the user's, its GPUs and its RDMA devices. Argument: the stage. */}}
{{- define "stagemesh.stageResources" -}}
{{- $resources := deepCopy .resources -}}
{{- $extended := dict -}}
{{- if gt (int .gpus) 0 -}}
  {{- $_ := set $extended .gpuResource (toString (int64 .gpus)) -}}
{{- end -}}
{{- if .rdma.enabled -}}
  {{- $_ := set $extended .rdma.resource (toString (int64 .rdma.count)) -}}
{{- end -}}
{{- if $extended -}}
  {{- range $kind := list "limits" "requests" -}}
    {{- $_ := set $resources $kind (merge (deepCopy $extended) (get $resources $kind | default dict)) -}}
  {{- end -}}
{{- end -}}
{{- range $kind := list "limits" "requests" -}}
  {{- $quantities := dict -}}
  {{- range $name, $quantity := get $resources $kind | default dict -}}
    {{- $_ := set $quantities $name (include "stagemesh.text" $quantity) -}}
  {{- end -}}
  {{- if $quantities }}
{{ $kind }}:
  {{- toYaml $quantities | nindent 2 }}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/*
The container of a stage. Arguments: (list root plan group stageName tier component). The tier is serving or warm. The
component is stage, or worker for the other nodes of a stage that spans nodes.
*/}}
{{- define "stagemesh.stageContainer" -}}
{{- $root := index . 0 -}}
{{- $group := index . 2 -}}
{{- $name := index . 3 -}}
{{- $tier := index . 4 -}}
{{- $stage := get (index . 1).stages $name -}}
- name: {{ $name | quote }}
  image: {{ include "stagemesh.image" (list $root $stage.image) | quote }}
  imagePullPolicy: {{ $stage.image.pullPolicy }}
  {{- $worker := eq (index . 5) "worker" }}
  {{- if and $worker $stage.multiNode.workerCommand }}
  command:
    {{- toYaml $stage.multiNode.workerCommand | nindent 4 }}
  {{- else }}
  {{- /* On the other nodes of a stage that spans nodes, the same command runs the workers of the node. */}}
  args:
    - serve
    - stage
    - --pipeline=/etc/stagemesh/pipeline.yaml
    - --stage={{ $name }}
    # A replica is named like its pod, or like its pod and its stage if the pod has several.
    - --replica=$(POD_NAME){{ if gt (len $group.stages) 1 }}-{{ $name }}{{ end }}
    - --listen=0.0.0.0:{{ int64 $stage.port }}
    - --generation={{ (index . 1).generation }}
    - --drain-s={{ int64 $group.drainSeconds }}
    {{- if $root.Values.tls.enabled }}
    - --tls=/etc/stagemesh/tls
    - --health-listen=0.0.0.0:{{ int64 $stage.healthPort }}
    {{- end }}
    {{- if include "stagemesh.isMonitored" $root }}
    - --metrics-listen=0.0.0.0:{{ int64 $stage.metricsPort }}
    {{- end }}
    {{- if eq $tier "warm" }}
    - --sleep-when-idle-s={{ int64 $group.warm.sleepAfterSeconds }}
    {{- end }}
  {{- end }}
  {{- if not $worker }}
  ports:
    - name: {{ $stage.portName }}
      containerPort: {{ int64 $stage.port }}
      protocol: TCP
    {{- if $root.Values.tls.enabled }}
    - name: {{ replace "grpc" "health" $stage.portName }}
      containerPort: {{ int64 $stage.healthPort }}
      protocol: TCP
    {{- end }}
    {{- if include "stagemesh.isMonitored" $root }}
    - name: {{ replace "grpc" "metrics" $stage.portName }}
      containerPort: {{ int64 $stage.metricsPort }}
      protocol: TCP
    {{- end }}
  startupProbe:
    {{- $period := 5 }}
    {{- include "stagemesh.probe" (list $stage.healthPort "stagemesh.v1.StageControlService" $period 5 (ceil (divf $stage.loadSeconds $period))) | nindent 4 }}
  # Depends on no other process: the server of this container answers.
  livenessProbe:
    {{- include "stagemesh.probe" (list $stage.healthPort "liveness" 10 5 6) | nindent 4 }}
  # The name of the stage is ready if the replica accepts steps and the orchestrators have released it for the rollout.
  readinessProbe:
    {{- include "stagemesh.probe" (list $stage.healthPort $name 2 2 3) | nindent 4 }}
  {{- end }}
  env:
    {{- include "stagemesh.stageEnv" (list $root $stage) | nindent 4 }}
  {{- with $stage.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "stagemesh.stageResources" $stage | trim }}
  resources:
    {{- . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "stagemesh.containerSecurity" (ternary (list "IPC_LOCK") list (and $stage.rdma.enabled $stage.rdma.ipcLock)) | nindent 4 }}
  volumeMounts:
    - name: config
      mountPath: /etc/stagemesh
      readOnly: true
    {{- include "stagemesh.scratchMounts" $root | nindent 4 }}
    - name: shm
      mountPath: /dev/shm
    {{- if include "stagemesh.cacheSource" $group.modelCache }}
    - name: models
      mountPath: /var/lib/stagemesh/models
      readOnly: true
    {{- end }}
    {{- with $stage.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
