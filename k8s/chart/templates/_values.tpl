{{/*
A copy of a mapping, overridden by another one, as JSON. Arguments: (list base overrides).
Mappings are merged, all other values are replaced. Sprig's mergeOverwrite keeps the base where an override is false, 0
or empty.
*/}}
{{- define "stagemesh.merge" -}}
{{- $result := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}
  {{- $old := get $result $key -}}
  {{- if and (kindIs "map" $value) (kindIs "map" $old) -}}
    {{- $value = include "stagemesh.merge" (list $old $value) | fromJson -}}
  {{- end -}}
  {{- $_ := set $result $key $value -}}
{{- end -}}
{{- toJson $result -}}
{{- end -}}

{{/* The settings that belong to a pod. All other settings of a stage belong to its container. */}}
{{- define "stagemesh.podKeys" -}}
replicas drainSeconds terminationGracePeriodSeconds surge minReadySeconds nodeSelector tolerations affinity topologySpreadConstraints priorityClassName runtimeClassName schedulerName serviceAccount podLabels podAnnotations volumes initContainers modelCache autoscaling warm podDisruptionBudget
{{- end -}}

{{/* The keys of modelCache that select the volume. */}}
{{- define "stagemesh.cacheSources" -}}
existingClaim claim hostPath none
{{- end -}}

{{/* The bytes of a Kubernetes quantity of memory, such as 4Gi. */}}
{{- define "stagemesh.bytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $factors := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (float64 $number) (get $factors $unit | default 1) | int64 -}}
{{- end -}}

{{/*
The pipeline file as YAML. Arguments: (list pipeline). Helm's YAML writes 1e-07, which YAML 1.1 reads as text: a point
makes it a number.
*/}}
{{- define "stagemesh.pipelineFile" -}}
{{- regexReplaceAll "(?m)(: |- )(-?[0-9])(e[-+][0-9]+)$" (toYaml .) "${1}${2}.0${3}" -}}
{{- end -}}
