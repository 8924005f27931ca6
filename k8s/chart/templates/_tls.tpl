{{/* The name of the Secret with a component's certificate. Arguments: (list root component-or-group). */}}
{{- define "stagemesh.tlsSecret" -}}
{{- $root := index . 0 -}}
{{- $owner := index . 1 -}}
{{- $tls := $root.Values.tls -}}
{{- if $tls.issuer.name -}}
{{- printf "%s-%s-tls" (include "stagemesh.fullname" $root) $owner -}}
{{- else if hasKey $tls.secrets $owner -}}
{{- get $tls.secrets $owner -}}
{{- else -}}
{{- $tls.secrets.stages -}}
{{- end -}}
{{- end -}}

{{/* The URIs in a component's certificate, which are its roles (docs/security.md), as a JSON array. Arguments: (list root owner stages). */}}
{{- define "stagemesh.tlsUris" -}}
{{- $root := index . 0 -}}
{{- $owner := index . 1 -}}
{{- $fullname := include "stagemesh.fullname" $root -}}
{{- if eq $owner "client" -}}
{{- list (printf "stagemesh://client/%s-test" $fullname) | toJson -}}
{{- else if eq $owner "operator" -}}
{{- list (printf "stagemesh://operator/%s-keda" $fullname) | toJson -}}
{{- else if has $owner (list "orchestrator" "media") -}}
{{- list (printf "stagemesh://%s/%s" "orchestrator" $fullname) | toJson -}}
{{- else -}}
{{- /* Replicas are named like their pods, whose names begin with that of the workload. */ -}}
{{- list (printf "stagemesh://stage/%s-%s-*" $fullname $owner) | toJson -}}
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
