{{/* The config of the gateways, as JSON. Argument: the root. */}}
{{- define "stagemesh.gatewayConfig" -}}
{{- $config := dict
  "listen" "0.0.0.0:8000"
  "servers" (list (list (include "stagemesh.clientAddress" .)))
  "hosts" (include "stagemesh.gatewayHosts" . | fromJsonArray)
  "metrics_listen" "0.0.0.0:9464"
  "cors_origins" .Values.gateway.corsOrigins
  "keep_alive_s" .Values.gateway.keepAliveSeconds
  "max_body_bytes" .Values.gateway.maxBodyBytes
  "max_websockets" .Values.gateway.maxWebsockets
  "max_responses_bytes" .Values.gateway.maxResponsesBytes
  "response_ttl_s" .Values.gateway.responseTtlSeconds
  "aliases" (.Values.gateway.aliases | default dict)
  "unknown_parameters" .Values.gateway.unknownParameters
  "strict" .Values.gateway.strict
  "page" .Values.gateway.page
-}}
{{- if .Values.tls.enabled -}}
  {{- $_ := set $config "tls" "/etc/stagemesh/tls" -}}
{{- end -}}
{{- if .Values.gateway.httpsSecret -}}
  {{- $_ := set $config "https" "/etc/stagemesh/https" -}}
{{- end -}}
{{- if .Values.gateway.voicesClaim -}}
  {{- $_ := set $config "voices" "/voices" -}}
{{- end -}}
{{- toPrettyJson $config -}}
{{- end -}}

{{/* The names by which clients may call the gateways, as a JSON array. Argument: the root. */}}
{{- define "stagemesh.gatewayHosts" -}}
{{- $name := printf "%s-gateway" (include "stagemesh.fullname" .) -}}
{{- $inside := list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) -}}
{{- $hosts := append $inside (include "stagemesh.serviceHost" (list . $name)) -}}
{{- if .Values.gateway.ingress.enabled -}}
  {{- $hosts = append $hosts .Values.gateway.ingress.host -}}
{{- end -}}
{{- concat $hosts .Values.gateway.hosts | uniq | toJson -}}
{{- end -}}

{{/* A probe by HTTP. Arguments: (list root period timeout failures). The kubelet accepts any certificate. */}}
{{- define "stagemesh.gatewayProbe" -}}
httpGet:
  port: http
  path: /health
  scheme: {{ include "stagemesh.gatewayScheme" (index . 0) | upper }}
periodSeconds: {{ int64 (index . 1) }}
timeoutSeconds: {{ int64 (index . 2) }}
failureThreshold: {{ int64 (index . 3) }}
{{- end -}}

{{/* The protocol of the gateways: http or https. */}}
{{- define "stagemesh.gatewayScheme" -}}
{{- ternary "https" "http" (ne .Values.gateway.httpsSecret "") -}}
{{- end -}}
