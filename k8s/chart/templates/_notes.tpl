{{/* What an operator should know about the values, as a JSON array of sentences. Arguments: (list root plan). */}}
{{- define "stagemesh.warnings" -}}
{{- $root := index . 0 -}}
{{- $values := $root.Values -}}
{{- $plan := index . 1 -}}
{{- $warnings := list -}}
{{- if not $values.tls.enabled -}}
  {{- $warnings = append $warnings "connections are neither encrypted nor authenticated. Restrict clients by networkPolicy." -}}
{{- end -}}
{{- if not $values.networkPolicy.enabled -}}
  {{- $warnings = append $warnings "networkPolicy.enabled is false. Every pod of the cluster can reach the ports of operators and stages." -}}
{{- end -}}
{{- if and (ne $values.orchestrator.service.type "ClusterIP") $values.networkPolicy.enabled -}}
  {{- $warnings = append $warnings (printf "the Service %s-orchestrator is of type %s, but networkPolicy.clients must also admit the clients outside the cluster." (include "stagemesh.fullname" $root) $values.orchestrator.service.type) -}}
{{- end -}}
{{- if and $values.gateway.enabled $values.tls.enabled (not $values.gateway.forwardTokens) -}}
  {{- $warnings = append $warnings "everyone who can reach the gateways has the rights of their certificate. Restrict networkPolicy.gatewayClients, or set gateway.forwardTokens." -}}
{{- end -}}
{{- if and $values.gateway.enabled $values.gateway.forwardTokens (not $values.gateway.httpsSecret) -}}
  {{- $warnings = append $warnings "the gateways serve HTTP, so that tokens are sent to them without encryption. Set gateway.httpsSecret." -}}
{{- end -}}
{{- $exposed := and $values.gateway.enabled (or $values.gateway.ingress.enabled (ne $values.gateway.service.type "ClusterIP")) -}}
{{- if and $exposed $values.networkPolicy.enabled -}}
  {{- $warnings = append $warnings "the gateways are exposed outside the cluster, but networkPolicy.gatewayClients must also admit the controller of the Ingress or the clients." -}}
{{- end -}}
{{- if and $values.jobs.enabled $values.jobs.databaseSecret $values.networkPolicy.enabled (not $values.networkPolicy.jobsEgress) -}}
  {{- $warnings = append $warnings "networkPolicy.jobsEgress is empty, so that job servers cannot reach their database. Add a rule for it." -}}
{{- end -}}
{{- if and $values.jobs.enabled $values.gateway.enabled $values.gateway.forwardTokens -}}
  {{- $warnings = append $warnings "the media service accepts no tokens, so that gateways that forward them cannot send the content of videos." -}}
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
  {{- $warnings = append $warnings (printf "IPC_LOCK of %s is not allowed in a namespace with Pod Security restricted or baseline, and has no effect on a process that is not root. Raise the memlock limit of the nodes' container runtime, and set rdma.ipcLock: false." (join ", " .)) -}}
{{- end -}}
{{- range $name, $entry := $values.pipeline.stages -}}
  {{- if and $values.networkPolicy.enabled (contains "${" (join "," $entry.addresses)) -}}
    {{- $warnings = append $warnings (printf "the chart cannot read the variables in pipeline.stages.%s.addresses. Permit these addresses by networkPolicy.orchestratorEgress and stageEgress." $name) -}}
  {{- end -}}
{{- end -}}
{{- $budgets := dict "orchestrator" (list $values.orchestrator.podDisruptionBudget $values.orchestrator.replicas) -}}
{{- if include "stagemesh.hasMedia" $root -}}
  {{- $_ := set $budgets "media" (list $values.media.podDisruptionBudget $values.media.replicas) -}}
{{- end -}}
{{- if $values.gateway.enabled -}}
  {{- $_ := set $budgets "gateway" (list $values.gateway.podDisruptionBudget $values.gateway.replicas) -}}
{{- end -}}
{{- if $values.jobs.enabled -}}
  {{- $_ := set $budgets "jobs" (list $values.jobs.podDisruptionBudget $values.jobs.replicas) -}}
{{- end -}}
{{- range $name, $group := $plan.groups -}}
  {{- $replicas := ternary $group.autoscaling.minReplicas $group.replicas $group.autoscaling.enabled -}}
  {{- $_ := set $budgets $name (list $group.podDisruptionBudget $replicas) -}}
{{- end -}}
{{- range $name, $budget := $budgets -}}
  {{- $kept := include "stagemesh.keptPods" $budget | int64 -}}
  {{- if and (first $budget).enabled (last $budget) (ge $kept (int64 (last $budget))) -}}
    {{- $warnings = append $warnings (printf "the PodDisruptionBudget of %s permits no eviction of its %v pods. A drain of their nodes waits until there are more." $name (last $budget)) -}}
  {{- end -}}
{{- end -}}
{{- range $name, $group := $plan.groups -}}
  {{- if and $group.modelCache.init.image $values.networkPolicy.enabled (not $values.networkPolicy.stageEgress) -}}
    {{- $warnings = append $warnings (printf "networkPolicy.stageEgress is empty. The init container of %s can only download models from hosts that it permits." $name) -}}
  {{- end -}}
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

{{/* The number of pods that a PodDisruptionBudget keeps. Arguments: (list budget replicas). Percentages are rounded up. */}}
{{- define "stagemesh.keptPods" -}}
{{- $budget := index . 0 -}}
{{- $replicas := index . 1 -}}
{{- $isMinimum := hasKey $budget "minAvailable" -}}
{{- $value := ternary $budget.minAvailable $budget.maxUnavailable $isMinimum -}}
{{- if kindIs "string" $value -}}
  {{- $value = divf (mul (trimSuffix "%" $value) $replicas) 100 | ceil -}}
{{- end -}}
{{- ternary (int64 $value) (sub $replicas (int64 $value)) $isMinimum -}}
{{- end -}}
