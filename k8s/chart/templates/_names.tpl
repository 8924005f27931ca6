{{/* The prefix of all resource names of the release. */}}
{{- define "stagemesh.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name -}}
{{- end -}}

{{/* The DNS name of a Service. Arguments: (list root name). */}}
{{- define "stagemesh.serviceHost" -}}
{{- $root := index . 0 -}}
{{- printf "%s.%s.svc.%s" (index . 1) $root.Release.Namespace $root.Values.clusterDomain -}}
{{- end -}}

{{/* The address at which clients in the cluster reach the orchestrators, host:port. */}}
{{- define "stagemesh.clientAddress" -}}
{{ include "stagemesh.serviceHost" (list . (printf "%s-orchestrator" (include "stagemesh.fullname" .))) }}:7780
{{- end -}}

{{/* The labels by which workloads and Services select pods. Arguments: (list root component [group]). */}}
{{- define "stagemesh.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: stagemesh
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
stagemesh.dev/group: {{ index . 2 | quote }}
{{- end }}
{{- end -}}

{{/* The label of a pod that runs a stage. Argument: the name of the stage. */}}
{{- define "stagemesh.stageLabel" -}}
stage.stagemesh.dev/{{ . }}: "true"
{{- end -}}

{{/* The labels of an object. Arguments: (list root component [group]). */}}
{{- define "stagemesh.labels" -}}
{{- $root := index . 0 -}}
{{ include "stagemesh.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service | quote }}
app.kubernetes.io/part-of: stagemesh
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | quote }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
The labels of a pod. Arguments: (list root generation labels component [group]), with further labels. The versions of
chart and application are omitted, because a new one alone must not restart pods. So is an empty generation.
*/}}
{{- define "stagemesh.podLabels" -}}
{{- include "stagemesh.selector" (concat (list (index . 0)) (slice . 3)) }}
app.kubernetes.io/part-of: stagemesh
{{- with index . 1 }}
stagemesh.dev/generation: {{ . | quote }}
{{- end }}
{{- with merge (deepCopy (index . 2)) (index . 0).Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Annotations, as YAML. Arguments: (list root annotations). They replace common ones of the same name. */}}
{{- define "stagemesh.annotations" -}}
{{- with merge (deepCopy (index . 1)) (index . 0).Values.commonAnnotations }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{/* The metadata of an object. Arguments: (list root name annotations component [group]), with further annotations. */}}
{{- define "stagemesh.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 | quote }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- include "stagemesh.labels" (concat (list $root) (slice . 3)) | nindent 2 }}
{{- with include "stagemesh.annotations" (list $root (index . 2)) }}
annotations:
  {{- . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
Images that override one another, as JSON. Argument: a list of images, the most general one first. The digest of an image
does not apply to another repository or tag.
*/}}
{{- define "stagemesh.mergeImages" -}}
{{- $image := dict -}}
{{- range . -}}
  {{- if or .repository .tag -}}
    {{- $image = omit $image "digest" -}}
  {{- end -}}
  {{- $image = mergeOverwrite $image (deepCopy .) -}}
{{- end -}}
{{- toJson $image -}}
{{- end -}}

{{/* An image's reference. Arguments: (list root image). A digest takes precedence over a tag. */}}
{{- define "stagemesh.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (toString ($image.tag | default $root.Chart.AppVersion)) -}}
{{- end -}}
{{- end -}}

{{/* The name of a component's ServiceAccount. Arguments: (list root component-or-group serviceAccount). */}}
{{- define "stagemesh.serviceAccountName" -}}
{{- $account := index . 2 -}}
{{- if $account.name -}}
{{- $account.name -}}
{{- else if $account.create -}}
{{- printf "%s-%s" (include "stagemesh.fullname" (index . 0)) (index . 1) -}}
{{- else -}}
default
{{- end -}}
{{- end -}}
