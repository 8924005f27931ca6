{{/* Fails with a message that names a value and the remedy. Arguments: (list path problem remedy). */}}
{{- define "stagemesh.refuse" -}}
{{- fail (printf "%s %s; %s" (index . 0) (index . 1) (index . 2)) -}}
{{- end -}}
{{- define "stagemesh.validateNames" -}}{{- end -}}
{{- define "stagemesh.validatePlan" -}}{{- end -}}
