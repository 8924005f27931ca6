{{/*
The pipeline file of the orchestrators. The numbers of replicas are omitted, so that a change of them restarts nothing.
*/}}
{{- define "stagemesh.orchestratorPipeline" -}}
{{- $pipeline := deepCopy .Values.pipeline -}}
{{- range $name, $entry := $pipeline.stages -}}
  {{- $_ := unset $entry "replicas" -}}
{{- end -}}
{{- toJson $pipeline -}}
{{- end -}}

{{/*
The pipeline file of all other pods. The limits of admission are omitted, so that a change of them restarts only the
orchestrators.
*/}}
{{- define "stagemesh.sharedPipeline" -}}
{{- omit (include "stagemesh.orchestratorPipeline" . | fromJson) "limits" | toJson -}}
{{- end -}}

{{/*
The pipeline file of a group's pods. Arguments: (list root group). Each node of a stage that spans nodes learns its rank and
the first node.
*/}}
{{- define "stagemesh.stagePipeline" -}}
{{- $group := index . 1 -}}
{{- $pipeline := include "stagemesh.sharedPipeline" (index . 0) | fromJson -}}
{{- if gt (int $group.nodes) 1 -}}
  {{- $entry := get $pipeline.stages (first $group.stages) -}}
  {{- $spread := dict "nnodes" $group.nodes "node_rank" "${LWS_WORKER_INDEX}" "master_addr" "${LWS_LEADER_ADDRESS}" -}}
  {{- $_ := set $entry "options" (merge $spread ($entry.options | default dict)) -}}
{{- end -}}
{{- toJson $pipeline -}}
{{- end -}}
