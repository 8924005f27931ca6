{{/*
The rules that the values must meet beyond values.schema.json. Each rule is a template of its own and fails with a message
that names the value and the remedy.
*/}}

{{/* Rules on names, which must hold before the plan is made. Argument: the root. */}}
{{- define "stagemesh.validateNames" -}}
{{- include "stagemesh.rule.pipelineGiven" . -}}
{{- include "stagemesh.rule.fullname" . -}}
{{- include "stagemesh.rule.variables" . -}}
{{- include "stagemesh.rule.knownStages" . -}}
{{- include "stagemesh.rule.edgeEnds" . -}}
{{- include "stagemesh.rule.groupNames" . -}}
{{- include "stagemesh.rule.externalStages" . -}}
{{- include "stagemesh.rule.splitStages" . -}}
{{- end -}}

{{/* All other rules. Arguments: (list root plan). */}}
{{- define "stagemesh.validatePlan" -}}
{{- include "stagemesh.rule.knownGroups" . -}}
{{- include "stagemesh.rule.podSettings" . -}}
{{- include "stagemesh.rule.nameLengths" . -}}
{{- include "stagemesh.rule.replicas" . -}}
{{- include "stagemesh.rule.ports" . -}}
{{- include "stagemesh.rule.portRanges" . -}}
{{- include "stagemesh.rule.externalHosts" . -}}
{{- include "stagemesh.rule.sharedMemoryEdges" . -}}
{{- include "stagemesh.rule.memory" . -}}
{{- include "stagemesh.rule.requests" . -}}
{{- include "stagemesh.rule.gpus" . -}}
{{- include "stagemesh.rule.rdma" . -}}
{{- include "stagemesh.rule.multiNode" . -}}
{{- include "stagemesh.rule.gracePeriods" . -}}
{{- include "stagemesh.rule.autoscaling" . -}}
{{- include "stagemesh.rule.warm" . -}}
{{- include "stagemesh.rule.modelCache" . -}}
{{- include "stagemesh.rule.environment" . -}}
{{- include "stagemesh.rule.initContainers" . -}}
{{- include "stagemesh.rule.volumes" . -}}
{{- include "stagemesh.rule.mediaStore" . -}}
{{- include "stagemesh.rule.labels" . -}}
{{- include "stagemesh.rule.clientService" . -}}
{{- include "stagemesh.rule.gateway" . -}}
{{- include "stagemesh.rule.jobs" . -}}
{{- include "stagemesh.rule.tls" . -}}
{{- include "stagemesh.rule.monitoring" . -}}
{{- include "stagemesh.rule.collector" . -}}
{{- end -}}

{{/* The path of the value of a group's setting. Arguments: (list root plan groupName setting). */}}
{{- define "stagemesh.podPath" -}}
{{- $values := (index . 0).Values -}}
{{- $name := index . 2 -}}
{{- $key := index . 3 -}}
{{- $stages := (get (index . 1).groups $name).stages -}}
{{- if hasKey (get $values.groups $name | default dict) $key -}}
groups.{{ $name }}.{{ $key }}
{{- else if gt (len $stages) 1 -}}
{{ ternary (printf "stageDefaults.%s" $key) (printf "groups.%s.%s" $name $key) (hasKey $values.stageDefaults $key) }}
{{- else if or (hasKey (get $values.stages (first $stages) | default dict) $key) (not (hasKey $values.stageDefaults $key)) -}}
stages.{{ first $stages }}.{{ $key }}
{{- else -}}
stageDefaults.{{ $key }}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.pipelineGiven" -}}
{{- if not .Values.pipeline.stages -}}
{{- fail "pipeline has no stages; set it to the content of a pipeline file, as `stagemesh k8s render FILE` prints it" -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.fullname" -}}
{{- $name := include "stagemesh.fullname" . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the release is named %q, which cannot begin the names of Services; set fullnameOverride to a name of lower-case letters, digits and '-', a letter first" $name) -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.variables" -}}
{{- $read := dict -}}
{{- range $name, $entry := .Values.pipeline.stages -}}
  {{- range $key := list "engine" "group" -}}
    {{- $_ := set $read (printf "pipeline.stages.%s.%s" $name $key) (get $entry $key) -}}
  {{- end -}}
{{- end -}}
{{- range $index, $edge := .Values.pipeline.edges -}}
  {{- range $key := list "from" "to" "connector" -}}
    {{- $_ := set $read (printf "pipeline.edges[%d].%s" $index $key) (get $edge $key) -}}
  {{- end -}}
{{- end -}}
{{- with .Values.pipeline.media -}}
  {{- $_ := set $read "pipeline.media.store" .store -}}
{{- end -}}
{{- if regexMatch "\\$\\{[^}\\n]*\\n" (include "stagemesh.pipelineFile" .Values.pipeline) -}}
  {{- fail "pipeline has a variable ${NAME:-default} that YAML breaks into two lines; shorten the text, or write a default without spaces" -}}
{{- end -}}
{{- range $path, $value := $read -}}
  {{- if contains "${" (toString $value) -}}
    {{- fail (printf "%s is %q, but the chart reads this value itself and knows no variables; write the value" $path $value) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.knownStages" -}}
{{- $known := keys .Values.pipeline.stages | sortAlpha -}}
{{- range $name, $_ := .Values.stages -}}
  {{- if not (has $name $known) -}}
    {{- fail (printf "stages.%s is not a stage of the pipeline; its stages are %s" $name (join ", " $known)) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.edgeEnds" -}}
{{- $known := keys .Values.pipeline.stages | sortAlpha -}}
{{- range $index, $edge := .Values.pipeline.edges -}}
  {{- range $key := list "from" "to" -}}
    {{- $isInput := and (eq $key "from") (eq (get $edge $key) "@input") -}}
    {{- if not (or $isInput (has (get $edge $key) $known)) -}}
      {{- fail (printf "pipeline.edges[%d].%s is %q, which is not a stage of the pipeline; its stages are %s" $index $key (get $edge $key) (join ", " $known)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.groupNames" -}}
{{- range $name, $entry := .Values.pipeline.stages -}}
  {{- $group := $entry.group | default $name -}}
  {{- range $path, $value := dict (printf "pipeline.stages.%s" $name) $name (printf "pipeline.stages.%s.group" $name) $group -}}
    {{- if not (regexMatch "^[a-z]([a-z0-9-]{0,28}[a-z0-9])?$" $value) -}}
      {{- fail (printf "%s is named %q; use at most 30 lower-case letters, digits and '-', a letter first and no '-' last" $path $value) -}}
    {{- end -}}
    {{- if or (has $value (list "orchestrator" "admin" "media" "gateway" "jobs" "test")) (hasSuffix "-warm" $value) -}}
      {{- fail (printf "%s is named %q, as another object of the chart is; choose a name other than orchestrator, admin, media, gateway, jobs and test, without the end -warm" $path $value) -}}
    {{- end -}}
  {{- end -}}
  {{- if eq $name "liveness" -}}
    {{- fail "pipeline.stages.liveness has the name of the health service that answers liveness probes; rename the stage" -}}
  {{- end -}}
  {{- $namesake := get $.Values.pipeline.stages $group -}}
  {{- if and $namesake (ne $group $name) (ne ($namesake.group | default "") $group) -}}
    {{- fail (printf "pipeline.stages.%s.group is %q, the name of a stage outside the group; choose another name, or add that stage to the group" $name $group) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.externalStages" -}}
{{- range $name, $entry := .Values.pipeline.stages -}}
  {{- $own := get $.Values.stages $name | default dict -}}
  {{- if eq $entry.engine "external" -}}
    {{- range $key := keys (omit $own "external") | sortAlpha -}}
      {{- fail (printf "stages.%s.%s has no effect, because the chart does not start external stages; remove it" $name $key) -}}
    {{- end -}}
    {{- if not (or $own.external $entry.addresses) -}}
      {{- fail (printf "stages.%s.external is not set, so that orchestrators cannot find the external stage; set its service and port, or pipeline.stages.%s.addresses" $name $name) -}}
    {{- end -}}
  {{- else if $own.external -}}
    {{- fail (printf "stages.%s.external is only for stages with `engine: external`; remove it" $name) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.splitStages" -}}
{{- range $name, $entry := .Values.pipeline.stages -}}
  {{- if hasKey $entry "split" -}}
    {{- fail (printf "pipeline.stages.%s.split is set, but the chart starts one group of replicas for each stage; write the values by `stagemesh k8s render`, which divides the stage" $name) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.knownGroups" -}}
{{- $known := keys (index . 1).groups | sortAlpha -}}
{{- range $name, $_ := (index . 0).Values.groups -}}
  {{- if not (has $name $known) -}}
    {{- fail (printf "groups.%s is not a colocation group of the pipeline; its groups are %s" $name (join ", " $known)) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.podSettings" -}}
{{- $root := index . 0 -}}
{{- $podKeys := splitList " " (include "stagemesh.podKeys" $root) -}}
{{- range $name, $group := (index . 1).groups -}}
  {{- if gt (len $group.stages) 1 -}}
    {{- range $stage := $group.stages -}}
      {{- range $key := keys (get $root.Values.stages $stage | default dict) | sortAlpha -}}
        {{- if has $key $podKeys -}}
          {{- fail (printf "stages.%s.%s is a setting of the pod, which has the stages %s; set groups.%s.%s" $stage $key (join ", " $group.stages) $name $key) -}}
        {{- end -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.nameLengths" -}}
{{- $fullname := include "stagemesh.fullname" (index . 0) -}}
{{- $names := list (printf "%s-orchestrator" $fullname) -}}
{{- range $name, $_ := (index . 1).stages -}}
  {{- $names = append $names (printf "%s-%s" $fullname $name) -}}
{{- end -}}
{{- range $name, $_ := (index . 1).groups -}}
  {{- $names = append $names (printf "%s-%s-warm" $fullname $name) -}}
{{- end -}}
{{- range $names -}}
  {{- if gt (len .) 63 -}}
    {{- fail (printf "fullnameOverride makes the name %q, which has more than 63 characters; set a shorter fullnameOverride, or shorten the names of stages" .) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.replicas" -}}
{{- $root := index . 0 -}}
{{- $plan := index . 1 -}}
{{- range $name, $group := $plan.groups -}}
  {{- $written := dig "replicas" 1 (get $plan.stages (first $group.stages)).entry -}}
  {{- range $stage := $group.stages -}}
    {{- $replicas := dig "replicas" 1 (get $plan.stages $stage).entry -}}
    {{- if ne (int $replicas) (int $written) -}}
      {{- fail (printf "pipeline.stages.%s.replicas is %v, but stage %s of the same group %s has %v; stages of one pod have the same number" $stage $replicas (first $group.stages) $name $written) -}}
    {{- end -}}
  {{- end -}}
  {{- if and (eq (int $group.replicas) 0) (not $group.autoscaling.enabled) (eq (int $group.warm.replicas) 0) -}}
    {{- $path := include "stagemesh.podPath" (list $root $plan $name "replicas") -}}
    {{- if eq (int $written) 0 -}}
      {{- $path = printf "pipeline.stages.%s.replicas" (first $group.stages) -}}
    {{- end -}}
    {{- fail (printf "%s is 0, but the pipeline needs stage %s; set at least 1, or remove the stage from the pipeline" $path (join " and " $group.stages)) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.ports" -}}
{{- $plan := index . 1 -}}
{{- range $name, $group := $plan.groups -}}
  {{- $owners := dict -}}
  {{- range $stage := $group.stages -}}
    {{- $port := toString (int64 (get $plan.stages $stage).port) -}}
    {{- if hasKey $owners $port -}}
      {{- fail (printf "stages.%s.port is %s, which stage %s of the same pod uses; set another port, or leave it out" $stage $port (get $owners $port)) -}}
    {{- end -}}
    {{- $_ := set $owners $port $stage -}}
  {{- end -}}
  {{- range $stage := $group.stages -}}
    {{- $port := toString (int64 (get $plan.stages $stage).healthPort) -}}
    {{- if ne (get $owners $port | default $stage) $stage -}}
      {{- fail (printf "stages.%s.port is %s, at which stage %s of the same pod answers health checks; set another port, or leave it out" (get $owners $port) $port $stage) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.portRanges" -}}
{{- $policy := (index . 0).Values.networkPolicy -}}
{{- range $key := list "stagePortRange" "ucxPortRange" -}}
  {{- $ports := splitList "-" (get $policy $key) -}}
  {{- if or (gt (int (first $ports)) (int (last $ports))) (lt (int (first $ports)) 1024) (gt (int (last $ports)) 65535) -}}
    {{- fail (printf "networkPolicy.%s is %q; write FIRST-LAST with ports from 1024 to 65535" $key (get $policy $key)) -}}
  {{- end -}}
{{- end -}}
{{- $stages := splitList "-" $policy.stagePortRange -}}
{{- $ucx := splitList "-" $policy.ucxPortRange -}}
{{- if and (le (int (first $stages)) (int (last $ucx))) (le (int (first $ucx)) (int (last $stages))) -}}
  {{- fail (printf "networkPolicy.ucxPortRange is %q, which overlaps networkPolicy.stagePortRange, %q; move one of them" $policy.ucxPortRange $policy.stagePortRange) -}}
{{- end -}}
{{- range $name, $stage := (index . 1).stages -}}
  {{- if or (lt (int $stage.port) (int (first $stages))) (gt (int $stage.port) (int (last $stages))) -}}
    {{- fail (printf "stages.%s.port is %d, outside networkPolicy.stagePortRange, %q; set a port of the range, or widen the range" $name (int $stage.port) $policy.stagePortRange) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* A NetworkPolicy names pods, namespaces and networks, but no hosts. */}}
{{- define "stagemesh.rule.externalHosts" -}}
{{- $root := index . 0 -}}
{{- $policy := $root.Values.networkPolicy -}}
{{- $reachesOut := false -}}
{{- range $policy.externalStages -}}
  {{- $reachesOut = or $reachesOut (hasKey . "namespaceSelector") (hasKey . "ipBlock") -}}
{{- end -}}
{{- range include "stagemesh.externalEndpoints" (index . 1) | fromJsonArray -}}
  {{- $rest := regexReplaceAll "^[^.]*" .host "" -}}
  {{- $namespace := $root.Release.Namespace -}}
  {{- $isNear := has $rest (list "" (printf ".%s" $namespace) (printf ".%s.svc" $namespace) (printf ".%s.svc.%s" $namespace $root.Values.clusterDomain)) -}}
  {{- if and $policy.enabled (not $isNear) (not $reachesOut) (not (include "stagemesh.isIp" .host)) -}}
    {{- fail (printf "networkPolicy.externalStages admits only pods of the namespace, but the external stage at %s:%v is outside of it; add a peer with its namespaceSelector or ipBlock" .host .port) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.sharedMemoryEdges" -}}
{{- $plan := index . 1 -}}
{{- range $index, $edge := (index . 0).Values.pipeline.edges -}}
  {{- if eq ($edge.connector | default "auto") "shm" -}}
    {{- $groups := list -}}
    {{- range $end := list $edge.from $edge.to -}}
      {{- $groups = append $groups (get $plan.stages $end | default (dict "group" (printf "%s (external)" $end))).group -}}
    {{- end -}}
    {{- if ne (first $groups) (last $groups) -}}
      {{- fail (printf "pipeline.edges[%d].connector is shm, but stages %s and %s are in the groups %s and %s, which share no memory; give both stages the same group, or set connector: auto" $index $edge.from $edge.to (first $groups) (last $groups)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.memory" -}}
{{- $stages := (index . 1).stages -}}
{{- range $name, $stage := $stages -}}
  {{- with dig "limits" "memory" "" $stage.resources -}}
    {{- $limit := include "stagemesh.quantity" . | float64 -}}
    {{- if gt (float64 $stage.arenaBytes) $limit -}}
      {{- fail (printf "pipeline.stages.%s.data_plane.arena_bytes is %d, but the memory limit stages.%s.resources.limits.memory is %v; raise the limit, or set a smaller arena" $name (int64 $stage.arenaBytes) $name .) -}}
    {{- end -}}
    {{- if gt (float64 $stage.shmBytes) $limit -}}
      {{- fail (printf "stages.%s.shmBytes is %d, but the memory limit stages.%s.resources.limits.memory is %v; raise the limit, or set less shared memory" $name (int64 $stage.shmBytes) $name .) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range $name, $group := (index . 1).groups -}}
  {{- $sum := 0.0 -}}
  {{- $paths := list -}}
  {{- range $stage := $group.stages -}}
    {{- with dig "limits" "memory" "" (get $stages $stage).resources -}}
      {{- $sum = addf $sum (include "stagemesh.quantity" . | float64) -}}
      {{- $paths = append $paths (printf "stages.%s.resources.limits.memory" $stage) -}}
    {{- end -}}
  {{- end -}}
  {{- /* A container without a limit may use what its node has. */ -}}
  {{- if and (eq (len $paths) (len $group.stages)) (gt (float64 $group.shmBytes) (float64 $sum)) -}}
    {{- fail (printf "the arenas and shmBytes of the pod with %s need %d bytes, but %s permit only %d; raise a limit, or set smaller arenas or shmBytes" (join " and " $group.stages) (int64 $group.shmBytes) (join " and " $paths) (int64 $sum)) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.requests" -}}
{{- $values := (index . 0).Values -}}
{{- $all := dict "orchestrator.resources" $values.orchestrator.resources "media.resources" $values.media.resources "jobs.resources" $values.jobs.resources -}}
{{- range $name, $stage := (index . 1).stages -}}
  {{- $_ := set $all (printf "stages.%s.resources" $name) $stage.resources -}}
{{- end -}}
{{- range $name, $group := (index . 1).groups -}}
  {{- $path := include "stagemesh.podPath" (list (index $ 0) (index $ 1) $name "modelCache") -}}
  {{- $_ := set $all (printf "%s.init.resources" $path) $group.modelCache.init.resources -}}
{{- end -}}
{{- range $path, $resources := $all -}}
  {{- range $name, $limit := $resources.limits -}}
    {{- with get ($resources.requests | default dict) $name -}}
      {{- if gt (include "stagemesh.quantity" . | float64) (include "stagemesh.quantity" $limit | float64) -}}
        {{- fail (printf "%s.requests.%s is %v, above %s.limits.%s, %v; lower the request, or raise the limit" $path $name . $path $name $limit) -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.gpus" -}}
{{- range $name, $stage := (index . 1).stages -}}
  {{- range $kind := list "limits" "requests" -}}
    {{- if and (gt (int $stage.gpus) 0) (hasKey (get $stage.resources $kind | default dict) $stage.gpuResource) -}}
      {{- fail (printf "stages.%s.resources.%s has %s, which stages.%s.gpus sets; keep one of them" $name $kind $stage.gpuResource $name) -}}
    {{- end -}}
  {{- end -}}
  {{- $gpus := include "stagemesh.gpuCount" $stage | int64 -}}
  {{- $device := dig "options" "device" "" $stage.entry | toString -}}
  {{- if and (hasPrefix "cuda" $device) (eq $gpus 0) -}}
    {{- fail (printf "pipeline.stages.%s.options.device is %s, but the stage has no GPU; set stages.%s.gpus, or device: cpu" $name $device $name) -}}
  {{- end -}}
  {{- $needed := include "stagemesh.ranks" $stage | int64 -}}
  {{- $present := mul $gpus $stage.multiNode.nodes -}}
  {{- if and (gt $gpus 0) (ne $device "cpu") (gt $needed $present) -}}
    {{- fail (printf "stages.%s.gpus gives a replica %d GPUs, but pipeline.stages.%s.options need %d (tensor_parallel_size, pipeline_parallel_size and parallel); set stages.%s.gpus, or multiNode.nodes" $name $present $name $needed $name) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* The number of processes that compute a stage's model, each on a GPU of its own. Argument: the stage. */}}
{{- define "stagemesh.ranks" -}}
{{- $options := .entry.options | default dict -}}
{{- $parallel := ternary $options.parallel dict (kindIs "map" $options.parallel) -}}
{{- $sizes := dict -}}
{{- range $key, $size := merge (pick $options "tensor_parallel_size" "pipeline_parallel_size") (pick $parallel "cfg" "ulysses" "hsdp") -}}
  {{- /* The chart cannot read a variable. */ -}}
  {{- if not (kindIs "string" $size) -}}
    {{- $_ := set $sizes $key (int64 $size) -}}
  {{- end -}}
{{- end -}}
{{- $branch := max ($sizes.ulysses | default 1) ($sizes.hsdp | default 1) -}}
{{- mul ($sizes.tensor_parallel_size | default 1) ($sizes.pipeline_parallel_size | default 1) ($sizes.cfg | default 1) $branch -}}
{{- end -}}

{{- define "stagemesh.rule.rdma" -}}
{{- range $name, $stage := (index . 1).stages -}}
  {{- $path := printf "stages.%s.rdma" $name -}}
  {{- if and $stage.rdma.gpuDirect (not $stage.rdma.enabled) -}}
    {{- fail (printf "%s.gpuDirect is true, but %s.enabled is false; set %s.enabled: true, or remove gpuDirect" $path $path $path) -}}
  {{- end -}}
  {{- if and $stage.rdma.gpuDirect (eq (include "stagemesh.gpuCount" $stage) "0") -}}
    {{- fail (printf "%s.gpuDirect is true, but the stage has no GPU; set stages.%s.gpus, or remove gpuDirect" $path $name) -}}
  {{- end -}}
  {{- if and (contains "cuda" (toString (get $stage.ucx "UCX_TLS"))) (eq (include "stagemesh.gpuCount" $stage) "0") -}}
    {{- fail (printf "stages.%s.ucx.UCX_TLS is %q, but the stage has no GPU; set stages.%s.gpus, or remove the transports of CUDA" $name $stage.ucx.UCX_TLS $name) -}}
  {{- end -}}
  {{- if and $stage.rdma.enabled (not $stage.rdma.resource) -}}
    {{- fail (printf "%s.resource is not set; name the resource of the RDMA device plug-in, such as rdma/hca_shared_devices_a" $path) -}}
  {{- end -}}
  {{- if and $stage.rdma.enabled (not $stage.nixl) -}}
    {{- fail (printf "%s.enabled is true, but no edge of the stage has connector nixl or auto; remove rdma, or change the edge's connector" $path) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.multiNode" -}}
{{- $root := index . 0 -}}
{{- $plan := index . 1 -}}
{{- range $name, $stage := $plan.stages -}}
  {{- if gt (int $stage.multiNode.nodes) 1 -}}
    {{- $group := get $plan.groups $stage.group -}}
    {{- if gt (len $group.stages) 1 -}}
      {{- fail (printf "stages.%s.multiNode.nodes is %v, but the stage shares a pod with other stages of group %s; remove it from the group" $name $stage.multiNode.nodes $stage.group) -}}
    {{- end -}}
    {{- if not (or $stage.multiNode.workerCommand (and (eq $stage.entry.engine "vllm") $stage.entry.model)) -}}
      {{- fail (printf "stages.%s.multiNode.workerCommand is not set; only stages with engine vllm and a model have a default command" $name) -}}
    {{- end -}}
    {{- if and $root.Values.tls.enabled (eq $stage.entry.engine "vllm") (not $stage.entry.insecure_tcp) -}}
      {{- fail (printf "stages.%s.multiNode.nodes is %v and tls.enabled is true, but vLLM connects nodes without TLS and authentication; set pipeline.stages.%s.insecure_tcp: true if the network between them is closed by other means" $name $stage.multiNode.nodes $name) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.gracePeriods" -}}
{{- $root := index . 0 -}}
{{- $settings := dict "orchestrator" $root.Values.orchestrator -}}
{{- range $name, $group := (index . 1).groups -}}
  {{- $path := include "stagemesh.podPath" (list $root (index $ 1) $name "terminationGracePeriodSeconds") -}}
  {{- $_ := set $settings (trimSuffix ".terminationGracePeriodSeconds" $path) $group -}}
{{- end -}}
{{- range $path, $pod := $settings -}}
  {{- $needed := add $pod.drainSeconds 30 -}}
  {{- if and $pod.terminationGracePeriodSeconds (lt (int64 $pod.terminationGracePeriodSeconds) $needed) -}}
    {{- fail (printf "%s.terminationGracePeriodSeconds is %v, but the drain of %v seconds and the end of the process need %d; raise it, or lower drainSeconds" $path $pod.terminationGracePeriodSeconds $pod.drainSeconds $needed) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.autoscaling" -}}
{{- $root := index . 0 -}}
{{- $plan := index . 1 -}}
{{- range $name, $group := $plan.groups -}}
  {{- $scaling := $group.autoscaling -}}
  {{- $path := include "stagemesh.podPath" (list $root $plan $name "autoscaling") -}}
  {{- if $scaling.enabled -}}
    {{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
      {{- fail (printf "%s.minReplicas is %v, which is above %s.maxReplicas, %v; lower the minimum, or raise the maximum" $path $scaling.minReplicas $path $scaling.maxReplicas) -}}
    {{- end -}}
    {{- if and (eq (int $scaling.minReplicas) 0) (or (eq $scaling.kind "hpa") (eq (int $group.warm.replicas) 0)) -}}
      {{- fail (printf "%s.minReplicas is 0, but the pipeline needs stage %s; set at least 1, or kind keda and a warm tier" $path (join " and " $group.stages)) -}}
    {{- end -}}
    {{- if and (eq $scaling.kind "keda") (not $scaling.prometheus.address) -}}
      {{- fail (printf "%s.kind is keda, but %s.prometheus.address is not set; set it, such as http://prometheus.monitoring:9090" $path $path) -}}
    {{- end -}}
    {{- if gt (int $scaling.fallbackReplicas) (int $scaling.maxReplicas) -}}
      {{- fail (printf "%s.fallbackReplicas is %v, which is above %s.maxReplicas, %v; lower it" $path $scaling.fallbackReplicas $path $scaling.maxReplicas) -}}
    {{- end -}}
    {{- if not (or $scaling.queuedSeconds $scaling.playoutAtRisk $scaling.inFlight) -}}
      {{- fail (printf "%s.queuedSeconds is 0, as all other targets are; set at least one of queuedSeconds, playoutAtRisk and inFlight" $path) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.warm" -}}
{{- $root := index . 0 -}}
{{- $plan := index . 1 -}}
{{- range $name, $group := $plan.groups -}}
  {{- if gt (int $group.warm.replicas) 0 -}}
    {{- $path := include "stagemesh.podPath" (list $root $plan $name "warm") -}}
    {{- range $stage := $group.stages -}}
      {{- $entry := (get $plan.stages $stage).entry -}}
      {{- if eq $entry.engine "function" -}}
        {{- fail (printf "%s.replicas is %v, but the engine function of stage %s cannot sleep; remove the warm tier" $path $group.warm.replicas $stage) -}}
      {{- end -}}
      {{- if and (eq $entry.engine "vllm") (not (dig "options" "enable_sleep_mode" false $entry)) -}}
        {{- fail (printf "%s.replicas is %v, but stage %s cannot sleep; set pipeline.stages.%s.options.enable_sleep_mode: true" $path $group.warm.replicas $stage $stage) -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.modelCache" -}}
{{- $root := index . 0 -}}
{{- $plan := index . 1 -}}
{{- range $name, $group := $plan.groups -}}
  {{- $cache := $group.modelCache -}}
  {{- $path := include "stagemesh.podPath" (list $root $plan $name "modelCache") -}}
  {{- $sources := list -}}
  {{- range $key := splitList " " (include "stagemesh.cacheSources" $root) -}}
    {{- if get $cache $key -}}
      {{- $sources = append $sources $key -}}
    {{- end -}}
  {{- end -}}
  {{- if gt (len $sources) 1 -}}
    {{- fail (printf "%s has %s; keep one of them" $path (join " and " $sources)) -}}
  {{- end -}}
  {{- if and $cache.init.image (not (include "stagemesh.cacheSource" $cache)) -}}
    {{- fail (printf "%s.init has an image, but there is no folder to fill; set one of existingClaim, claim and hostPath" $path) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.environment" -}}
{{- $values := (index . 0).Values -}}
{{- /* Arguments, mounts and policies of the chart depend on these. All others may be replaced. */ -}}
{{- $reserved := dict "POD_NAME" "the chart sets it; remove it" "STAGEMESH_HOME" "the chart mounts its folder; remove it" "UCX_TCP_PORT_RANGE" "set networkPolicy.ucxPortRange instead" -}}
{{- $environments := dict "orchestrator.env" $values.orchestrator.env "media.env" $values.media.env "gateway.env" $values.gateway.env "jobs.env" $values.jobs.env -}}
{{- range $name, $stage := (index . 1).stages -}}
  {{- $_ := set $environments (printf "stages.%s.env" $name) $stage.env -}}
  {{- if hasKey $stage.ucx "UCX_TCP_PORT_RANGE" -}}
    {{- fail (printf "stages.%s.ucx has the variable UCX_TCP_PORT_RANGE; %s" $name $reserved.UCX_TCP_PORT_RANGE) -}}
  {{- end -}}
{{- end -}}
{{- range $name, $group := (index . 1).groups -}}
  {{- $path := include "stagemesh.podPath" (list (index $ 0) (index $ 1) $name "modelCache") -}}
  {{- $_ := set $environments (printf "%s.init.env" $path) $group.modelCache.init.env -}}
{{- end -}}
{{- range $path, $env := $environments -}}
  {{- $names := list -}}
  {{- range $env -}}
    {{- if has .name $names -}}
      {{- fail (printf "%s has the variable %s more than once; keep one" $path .name) -}}
    {{- end -}}
    {{- if hasKey $reserved .name -}}
      {{- fail (printf "%s has the variable %s; %s" $path .name (get $reserved .name)) -}}
    {{- end -}}
    {{- $names = append $names .name -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.initContainers" -}}
{{- $root := index . 0 -}}
{{- $plan := index . 1 -}}
{{- range $name, $group := $plan.groups -}}
  {{- $path := include "stagemesh.podPath" (list $root $plan $name "initContainers") -}}
  {{- $names := append $group.stages "model-cache" -}}
  {{- range $index, $container := $group.initContainers -}}
    {{- if has $container.name $names -}}
      {{- fail (printf "%s[%d].name is %q, which another container of the pod has; choose another name" $path $index $container.name) -}}
    {{- end -}}
    {{- $names = append $names $container.name -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.volumes" -}}
{{- $root := index . 0 -}}
{{- $plan := index . 1 -}}
{{- range $name, $group := $plan.groups -}}
  {{- $path := include "stagemesh.podPath" (list $root $plan $name "volumes") -}}
  {{- include "stagemesh.checkVolumeNames" (list $path $group.volumes) -}}
  {{- range $stage := $group.stages -}}
    {{- include "stagemesh.checkMounts" (list (printf "stages.%s.volumeMounts" $stage) (get $plan.stages $stage).volumeMounts $path $group.volumes) -}}
  {{- end -}}
{{- end -}}
{{- $media := $root.Values.media -}}
{{- include "stagemesh.checkVolumeNames" (list "media.volumes" $media.volumes) -}}
{{- include "stagemesh.checkMounts" (list "media.volumeMounts" $media.volumeMounts "media.volumes" $media.volumes) -}}
{{- $jobs := $root.Values.jobs -}}
{{- include "stagemesh.checkVolumeNames" (list "jobs.volumes" $jobs.volumes "database") -}}
{{- include "stagemesh.checkMounts" (list "jobs.volumeMounts" $jobs.volumeMounts "jobs.volumes" $jobs.volumes "/var/lib/stagemesh/jobs") -}}
{{- end -}}

{{/* Arguments: (list path volumes [names]), with the names of further volumes of the chart. */}}
{{- define "stagemesh.checkVolumeNames" -}}
{{- $names := concat (list "config" "tmp" "home" "shm" "models") (slice . 2) -}}
{{- range $index, $volume := index . 1 -}}
  {{- if has $volume.name $names -}}
    {{- fail (printf "%s[%d].name is %q, which another volume of the pod has; choose another name" (index $ 0) $index $volume.name) -}}
  {{- end -}}
  {{- $names = append $names $volume.name -}}
{{- end -}}
{{- end -}}

{{/* Arguments: (list path mounts volumesPath volumes [paths]), with further paths at which the chart mounts volumes. */}}
{{- define "stagemesh.checkMounts" -}}
{{- $names := list -}}
{{- range index . 3 -}}
  {{- $names = append $names .name -}}
{{- end -}}
{{- $paths := concat (list "/etc/stagemesh" "/tmp" "/var/lib/stagemesh" "/dev/shm" "/var/lib/stagemesh/models") (slice . 4) -}}
{{- range $index, $mount := index . 1 -}}
  {{- if not (has $mount.name $names) -}}
    {{- fail (printf "%s[%d].name is %q, but %s has no volume of this name; add it there" (index $ 0) $index $mount.name (index $ 2)) -}}
  {{- end -}}
  {{- if has (clean $mount.mountPath) $paths -}}
    {{- fail (printf "%s[%d].mountPath is %q, where another volume is mounted; choose another path" (index $ 0) $index $mount.mountPath) -}}
  {{- end -}}
  {{- $paths = append $paths (clean $mount.mountPath) -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.mediaStore" -}}
{{- $root := index . 0 -}}
{{- $folder := include "stagemesh.hasMedia" $root | trimPrefix "file://" -}}
{{- if hasPrefix "/" $folder -}}
  {{- $mounts := dict "media.volumeMounts" $root.Values.media.volumeMounts -}}
  {{- if $root.Values.jobs.enabled -}}
    {{- $_ := set $mounts "jobs.volumeMounts" $root.Values.jobs.volumeMounts -}}
  {{- end -}}
  {{- range $name, $stage := (index . 1).stages -}}
    {{- $_ := set $mounts (printf "stages.%s.volumeMounts" $name) $stage.volumeMounts -}}
  {{- end -}}
  {{- range $path, $list := $mounts -}}
    {{- $mounted := false -}}
    {{- range $list -}}
      {{- if hasPrefix (printf "%s/" (clean .mountPath)) (printf "%s/" (clean $folder)) -}}
        {{- $mounted = true -}}
      {{- end -}}
    {{- end -}}
    {{- if not $mounted -}}
      {{- fail (printf "%s mounts nothing at pipeline.media.store, %q; mount there a volume that all pods share, or use an object store" $path $folder) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.labels" -}}
{{- $values := (index . 0).Values -}}
{{- $labels := dict "commonLabels" $values.commonLabels "orchestrator.podLabels" $values.orchestrator.podLabels "media.podLabels" $values.media.podLabels "gateway.podLabels" $values.gateway.podLabels "jobs.podLabels" $values.jobs.podLabels -}}
{{- range $name, $group := (index . 1).groups -}}
  {{- $_ := set $labels (include "stagemesh.podPath" (list (index $ 0) (index $ 1) $name "podLabels")) $group.podLabels -}}
{{- end -}}
{{- range $path, $map := $labels -}}
  {{- range $key, $_ := $map -}}
    {{- if or (has $key (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "app.kubernetes.io/part-of" "helm.sh/chart")) (regexMatch "^(stage\\.)?stagemesh\\.dev/" $key) -}}
      {{- fail (printf "%s has the label %s, which the chart sets itself; remove it" $path $key) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.clientService" -}}
{{- $service := (index . 0).Values.orchestrator.service -}}
{{- $port := int $service.nodePort -}}
{{- if and $port (or (lt $port 30000) (gt $port 32767)) -}}
{{- fail (printf "orchestrator.service.nodePort is %d; set a port of nodes, from 30000 to 32767, or 0" $port) -}}
{{- end -}}
{{- if and $service.nodePort (eq $service.type "ClusterIP") -}}
{{- fail "orchestrator.service.nodePort is set, but a Service of type ClusterIP has no port on nodes; set type NodePort or LoadBalancer" -}}
{{- end -}}
{{- range $key := list "loadBalancerClass" "loadBalancerSourceRanges" -}}
  {{- if and (get $service $key) (ne $service.type "LoadBalancer") -}}
    {{- fail (printf "orchestrator.service.%s is set, but the type is %s; set type LoadBalancer, or remove it" $key $service.type) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.gateway" -}}
{{- $values := (index . 0).Values -}}
{{- $gateway := $values.gateway -}}
{{- if and $gateway.ingress.enabled (not $gateway.enabled) -}}
{{- fail "gateway.ingress.enabled is true, but gateway.enabled is false; set gateway.enabled: true, or remove the Ingress" -}}
{{- end -}}
{{- if and $gateway.ingress.enabled (not $gateway.ingress.host) -}}
{{- fail "gateway.ingress.host is not set; set the host name at which clients reach the gateways, or gateway.ingress.enabled: false" -}}
{{- end -}}
{{- if and $gateway.forwardTokens (not (include "stagemesh.tokens" (index . 0) | fromJson)) -}}
{{- fail "gateway.forwardTokens is true, but tls.tokens names no tokens that the orchestrators accept; set tls.tokens.secret or tls.tokens.keys, or gateway.forwardTokens: false" -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.jobs" -}}
{{- $root := index . 0 -}}
{{- $jobs := $root.Values.jobs -}}
{{- if and $jobs.enabled (not (include "stagemesh.hasMedia" $root)) -}}
{{- fail "jobs.enabled is true, but pipeline.media.store is not set, in which the results of jobs are stored; set pipeline.media.store, or jobs.enabled: false" -}}
{{- end -}}
{{- if and $jobs.enabled (contains "${" (toJson $root.Values.pipeline.media)) -}}
{{- fail "jobs.enabled is true, but pipeline.media has a variable, which job servers do not know; write the value, or take credentials from jobs.env, media.env and stageDefaults.env" -}}
{{- end -}}
{{- if and $jobs.enabled (gt (int $jobs.replicas) 1) (not $jobs.databaseSecret) -}}
{{- fail (printf "jobs.replicas is %v, but only one pod can use a SQLite file; set jobs.databaseSecret to a Secret with the URL of a PostgreSQL database, or jobs.replicas: 1" $jobs.replicas) -}}
{{- end -}}
{{- if and $jobs.databaseSecret $jobs.sqlite.claim -}}
{{- fail "jobs.databaseSecret and jobs.sqlite.claim are both set; keep one of them" -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.tls" -}}
{{- $root := index . 0 -}}
{{- $tls := $root.Values.tls -}}
{{- $needed := append (include "stagemesh.tlsComponents" $root | fromJsonArray) "stages" -}}
{{- range $owner, $secret := $tls.secrets -}}
  {{- if and $secret (not $tls.enabled) -}}
    {{- fail (printf "tls.secrets.%s is set, but tls.enabled is false; set tls.enabled: true, or remove the secret" $owner) -}}
  {{- end -}}
  {{- if and $secret $tls.issuer.name -}}
    {{- fail (printf "tls.secrets.%s and tls.issuer.name are both set; keep the issuer or the secrets" $owner) -}}
  {{- end -}}
  {{- if and $tls.enabled (not $tls.issuer.name) (not $secret) (has $owner $needed) -}}
    {{- fail (printf "tls.enabled is true, but tls.secrets.%s is not set; set it, or tls.issuer.name to create the certificates" $owner) -}}
  {{- end -}}
{{- end -}}
{{- range $name, $group := (index . 1).groups -}}
  {{- $other := regexReplaceAll "-[^-]+$" $name "" | trimSuffix "-warm" -}}
  {{- with get (index $ 1).groups $other -}}
    {{- if and $tls.enabled (gt (int $group.nodes) 1) (le (int .nodes) 1) -}}
      {{- fail (printf "the pods of stage %s, which spans nodes, have names that the certificate of %s accepts; rename one of them" $name $other) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and (include "stagemesh.tokens" $root | fromJson) (not $tls.enabled) -}}
  {{- fail "tls.tokens is set, but tls.enabled is false, so that others could read the tokens; set tls.enabled: true, or remove the tokens" -}}
{{- end -}}
{{- range $key := list "issuer" "audience" -}}
  {{- if ne (empty $tls.tokens.keys) (empty (get $tls.tokens $key)) -}}
    {{- fail (printf "tls.tokens.keys and tls.tokens.%s belong together; set both, or neither" $key) -}}
  {{- end -}}
{{- end -}}
{{- if ge (include "stagemesh.milliseconds" $tls.renewBefore | int64) (include "stagemesh.milliseconds" $tls.duration | int64) -}}
  {{- fail (printf "tls.renewBefore is %s, but tls.duration is only %s; renew later, or let certificates last longer" $tls.renewBefore $tls.duration) -}}
{{- end -}}
{{- if and $tls.issuer.name (not $tls.enabled) -}}
  {{- fail "tls.issuer.name is set, but tls.enabled is false; set tls.enabled: true, or remove the issuer" -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.collector" -}}
{{- $root := index . 0 -}}
{{- $endpoint := $root.Values.otlp.endpoint -}}
{{- if and $endpoint $root.Values.networkPolicy.enabled (not (include "stagemesh.collectorPeers" $root)) -}}
{{- fail (printf "otlp.endpoint is %s, whose host is neither an IP address nor a Service of the cluster, NAME.NAMESPACE or NAME.NAMESPACE.svc; set networkPolicy.collector to the peers that the collector is, for example [{ipBlock: {cidr: 192.0.2.0/24}}]" $endpoint) -}}
{{- end -}}
{{- end -}}

{{- define "stagemesh.rule.monitoring" -}}
{{- $monitoring := (index . 0).Values.monitoring -}}
{{- if and $monitoring.serviceMonitor.enabled $monitoring.podMonitor.enabled -}}
{{- fail "monitoring.podMonitor.enabled and monitoring.serviceMonitor.enabled are both true, which would count everything twice; keep one of them" -}}
{{- end -}}
{{- range $name := list "serviceMonitor" "podMonitor" -}}
  {{- $monitor := get $monitoring $name -}}
  {{- if gt (include "stagemesh.milliseconds" $monitor.scrapeTimeout | int64) (include "stagemesh.milliseconds" $monitor.interval | int64) -}}
    {{- fail (printf "monitoring.%s.scrapeTimeout is %s, above monitoring.%s.interval, %s; lower it" $name $monitor.scrapeTimeout $name $monitor.interval) -}}
  {{- end -}}
{{- end -}}
{{- end -}}
