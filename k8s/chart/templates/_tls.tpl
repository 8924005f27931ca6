{{/* The name of the Secret with a component's certificate. Arguments: (list root component-or-group). */}}
{{- define "stagemesh.tlsSecret" -}}
{{- $root := index . 0 -}}
{{- $owner := index . 1 -}}
{{- $tls := $root.Values.tls -}}
{{- if $tls.issuer.name -}}
{{- printf "%s-%s-tls" (include "stagemesh.fullname" $root) $owner -}}
{{- else if has $owner (list "orchestrator" "media") -}}
{{- get $tls.secrets $owner -}}
{{- else -}}
{{- $tls.secrets.stages -}}
{{- end -}}
{{- end -}}

{{/*
An annotation that restarts pods if the source of their certificates changes. A renewed certificate does not change it,
because its content is not known to the chart.
*/}}
{{- define "stagemesh.tlsChecksum" -}}
{{- if .Values.tls.enabled -}}
checksum/tls: {{ toJson .Values.tls | sha256sum | quote }}
{{- end -}}
{{- end -}}
