{{/* The config of the job servers, as JSON. Argument: the root. A pod's name is an argument of its process. */}}
{{- define "stagemesh.jobsConfig" -}}
{{- $settings := .Values.jobs -}}
{{- $config := dict
  "pipeline" .Values.pipeline.pipeline
  "listen" "0.0.0.0:7795"
  "servers" (list (include "stagemesh.clientAddress" .))
  "media" .Values.pipeline.media
  "max_running" $settings.maxRunning
  "max_queued" $settings.maxQueued
  "max_queued_per_caller" $settings.maxQueuedPerCaller
  "max_jobs_per_caller" $settings.maxJobsPerCaller
  "max_request_bytes" $settings.maxRequestBytes
  "max_failures" $settings.maxFailures
  "lease_s" $settings.leaseSeconds
  "max_wait_s" $settings.maxWaitSeconds
  "keep_s" $settings.keepSeconds
-}}
{{- if $settings.databaseSecret -}}
  {{- $_ := set $config "database_file" "/etc/stagemesh/database/url" -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
  {{- $_ := set $config "tls" "/etc/stagemesh/tls" -}}
  {{- $_ := set $config "health_listen" (printf "0.0.0.0:%s" (include "stagemesh.jobsHealthPort" .)) -}}
{{- end -}}
{{- with include "stagemesh.tokens" . | fromJson -}}
  {{- $_ := set $config "tokens" . -}}
{{- end -}}
{{- toPrettyJson $config -}}
{{- end -}}

{{/* The port at which the kubelet probes the job servers. With TLS, it is apart, because probes have no certificate. */}}
{{- define "stagemesh.jobsHealthPort" -}}
{{- ternary 7796 7795 .Values.tls.enabled -}}
{{- end -}}
