{{/* The config of the orchestrators, as JSON. Arguments: (list root plan). */}}
{{- define "stagemesh.orchestratorConfig" -}}
{{- $root := index . 0 -}}
{{- $plan := index . 1 -}}
{{- $settings := $root.Values.orchestrator -}}
{{- $fullname := include "stagemesh.fullname" $root -}}
{{- $dns := dict -}}
{{- $warm := dict -}}
{{- range $name, $stage := $plan.stages -}}
  {{- $host := include "stagemesh.serviceHost" (list $root (printf "%s-%s" $fullname $name)) -}}
  {{- $_ := set $dns $name (dict "host" $host "port" $stage.port "poll_s" 1) -}}
  {{- $tier := (get $plan.groups $stage.group).warm -}}
  {{- if gt (int $tier.replicas) 0 -}}
    {{- $_ := set $warm $name $tier.wakeAboveSeconds -}}
  {{- end -}}
{{- end -}}
{{- range $name, $service := $plan.external -}}
  {{- $_ := set $dns $name (dict "host" $service.host "port" $service.port "poll_s" 1) -}}
{{- end -}}
{{- $config := dict
  "pipeline" "/etc/stagemesh/pipeline.yaml"
  "replicas" dict
  "listen" "0.0.0.0:7780"
  "admin_listen" "0.0.0.0:7781"
  "metrics_listen" "0.0.0.0:9464"
  "dns" $dns
  "generation" $plan.generation
  "generations" (list (printf "%s-*" $plan.topology))
  "max_request_s" $settings.maxRequestSeconds
  "max_kept_state_bytes" $settings.maxKeptStateBytes
  "drain_s" $settings.drainSeconds
-}}
{{- if $root.Values.tls.enabled -}}
  {{- $_ := set $config "tls" "/etc/stagemesh/tls" -}}
  {{- $_ := set $config "health_listen" (printf "0.0.0.0:%s" (include "stagemesh.orchestratorHealthPort" $root)) -}}
{{- end -}}
{{- with include "stagemesh.tokens" $root | fromJson -}}
  {{- $_ := set $config "tokens" . -}}
{{- end -}}
{{- if $warm -}}
  {{- $_ := set $config "warm" $warm -}}
{{- end -}}
{{- if include "stagemesh.hasMedia" $root -}}
  {{- $host := include "stagemesh.serviceHost" (list $root (printf "%s-media" $fullname)) -}}
  {{- $_ := set $config "media_endpoint" ($root.Values.media.endpoint | default (printf "%s:7790" $host)) -}}
  {{- if $root.Values.tls.enabled -}}
    {{- $_ := set $config "media_server_name" $host -}}
  {{- end -}}
{{- end -}}
{{- if $root.Values.jobs.enabled -}}
  {{- $host := include "stagemesh.serviceHost" (list $root (printf "%s-jobs" $fullname)) -}}
  {{- $_ := set $config "jobs_endpoint" ($root.Values.jobs.endpoint | default (printf "%s:7795" $host)) -}}
  {{- if $root.Values.tls.enabled -}}
    {{- $_ := set $config "jobs_server_name" $host -}}
  {{- end -}}
{{- end -}}
{{- toPrettyJson $config -}}
{{- end -}}

{{/* The tokens that the orchestrators and the job servers accept, as JSON. Empty if there are none. */}}
{{- define "stagemesh.tokens" -}}
{{- $given := .Values.tls.tokens -}}
{{- $tokens := dict -}}
{{- if $given.secret -}}
  {{- $_ := set $tokens "file" "/etc/stagemesh/tokens/tokens.json" -}}
{{- end -}}
{{- if $given.keys -}}
  {{- $tokens = merge $tokens (dict "keys" $given.keys "issuer" $given.issuer "audience" $given.audience "caller_claim" $given.callerClaim) -}}
{{- end -}}
{{- toJson $tokens -}}
{{- end -}}

{{/* The port at which the kubelet probes the orchestrators. With TLS, it is apart, because probes have no certificate. */}}
{{- define "stagemesh.orchestratorHealthPort" -}}
{{- ternary 7782 7780 .Values.tls.enabled -}}
{{- end -}}

{{/* Not empty if the pipeline stores media files. */}}
{{- define "stagemesh.hasMedia" -}}
{{- dig "media" "store" "" .Values.pipeline -}}
{{- end -}}
