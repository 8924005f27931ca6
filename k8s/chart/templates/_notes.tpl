{{/* What an operator should know about the values, as a JSON array of sentences. Arguments: (list root plan). */}}
{{- define "stagemesh.warnings" -}}
{{- $root := index . 0 -}}
{{- $values := $root.Values -}}
{{- $plan := index . 1 -}}
{{- $warnings := list -}}
{{- if $values.tls.enabled -}}
  {{- $warnings = append $warnings "this version does not use the certificates yet. All connections are plaintext." -}}
{{- else -}}
  {{- $warnings = append $warnings "connections are neither encrypted nor authenticated. Restrict clients by networkPolicy." -}}
{{- end -}}
{{- if not $values.networkPolicy.enabled -}}
  {{- $warnings = append $warnings "networkPolicy.enabled is false. Every pod of the cluster can reach the ports of operators and stages." -}}
{{- end -}}
{{- if and (ne $values.orchestrator.service.type "ClusterIP") $values.networkPolicy.enabled -}}
  {{- $warnings = append $warnings (printf "the Service %s-orchestrator is of type %s, but networkPolicy.clients must also admit the clients outside the cluster." (include "stagemesh.fullname" $root) $values.orchestrator.service.type) -}}
{{- end -}}
{{- $unlimited := list -}}
{{- $locking := list -}}
{{- range $name, $stage := $plan.stages -}}
  {{- if not (dig "limits" "memory" "" $stage.resources) -}}
    {{- $unlimited = append $unlimited $name -}}
  {{- end -}}
  {{- if and $stage.rdma.enabled $stage.rdma.ipcLock -}}
    {{- $locking = append $locking $name -}}
  {{- end -}}
{{- end -}}
{{- with $unlimited -}}
  {{- $warnings = append $warnings (printf "no memory limit is set for %s. A stage that grows can then evict others from its node." (join ", " .)) -}}
{{- end -}}
{{- with $locking -}}
  {{- $warnings = append $warnings (printf "IPC_LOCK of %s is not allowed in a namespace with Pod Security restricted or baseline." (join ", " .)) -}}
{{- end -}}
{{- range $name, $group := $plan.groups -}}
  {{- if eq (include "stagemesh.cacheSource" $group.modelCache) "hostPath" -}}
    {{- $warnings = append $warnings (printf "the hostPath volume of %s is not allowed in a namespace with Pod Security restricted or baseline." $name) -}}
  {{- end -}}
  {{- if and $group.autoscaling.enabled (eq $group.autoscaling.kind "hpa") (not (or $values.monitoring.serviceMonitor.enabled $values.monitoring.podMonitor.enabled)) -}}
    {{- $warnings = append $warnings (printf "the autoscaler of %s reads metrics of Prometheus, but neither monitoring.serviceMonitor nor monitoring.podMonitor is enabled." $name) -}}
  {{- end -}}
{{- end -}}
{{- if eq (int $values.orchestrator.replicas) 1 -}}
  {{- $warnings = append $warnings "orchestrator.replicas is 1. Requests that run in the only orchestrator restart if it is lost." -}}
{{- end -}}
{{- toJson $warnings -}}
{{- end -}}
