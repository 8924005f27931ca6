{{/* The settings that belong to a pod. All other settings of a stage belong to its container. */}}
{{- define "stagemesh.podKeys" -}}
replicas drainSeconds terminationGracePeriodSeconds surge minReadySeconds nodeSelector tolerations affinity topologySpreadConstraints priorityClassName runtimeClassName schedulerName serviceAccount podLabels podAnnotations volumes initContainers modelCache autoscaling warm podDisruptionBudget
{{- end -}}

{{/* The keys of modelCache that select the volume. */}}
{{- define "stagemesh.cacheSources" -}}
existingClaim claim hostPath none
{{- end -}}

{{/* A scalar as text. Helm itself writes large numbers with an exponent. */}}
{{- define "stagemesh.text" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end -}}

{{/* The value of a Kubernetes quantity, such as 500m or 4Gi, as a decimal number. */}}
{{- define "stagemesh.quantity" -}}
{{- $text := include "stagemesh.text" . -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $factors := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- mulf (float64 $number) (get $factors (trimPrefix $number $text)) -}}
{{- end -}}

{{/* The milliseconds of a duration, such as 1h30m. */}}
{{- define "stagemesh.milliseconds" -}}
{{- $factors := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 "d" 86400000 -}}
{{- $sum := 0 -}}
{{- range regexFindAll "[0-9]+(ms|s|m|h|d)" . -1 -}}
  {{- $number := regexFind "^[0-9]+" . -}}
  {{- $sum = add $sum (mul (int64 $number) (get $factors (trimPrefix $number .))) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{/* The number of GPUs of a stage's container, which `gpus` or the resources themselves may set. Argument: the stage. */}}
{{- define "stagemesh.gpuCount" -}}
{{- int64 .gpus | default (dig "limits" .gpuResource 0 .resources | toString | int64) -}}
{{- end -}}

{{/*
The pipeline file as YAML. Arguments: (list pipeline). Helm's YAML writes 1e-07, which YAML 1.1 reads as text: a point
makes it a number.
*/}}
{{- define "stagemesh.pipelineFile" -}}
{{- regexReplaceAll "(?m)(: |- )(-?[0-9])(e[-+][0-9]+)$" (toYaml .) "${1}${2}.0${3}" -}}
{{- end -}}
