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

{{/* The keys of that Secret which the component reads, as a JSON array. Arguments: (list root component-or-group). */}}
{{- define "stagemesh.tlsKeys" -}}
{{- $forwards := and (eq (index . 1) "gateway") (index . 0).Values.gateway.forwardTokens -}}
{{- ternary (list "ca.crt") (list "ca.crt" "tls.crt" "tls.key") $forwards | toJson -}}
{{- end -}}

{{/*
The components that need a certificate, as a JSON array, without the groups: the orchestrators, the media service, the
gateways, the job servers, and the test of the release. Argument: root.
*/}}
{{- define "stagemesh.tlsComponents" -}}
{{- $owners := list "orchestrator" -}}
{{- if include "stagemesh.hasMedia" . -}}
  {{- $owners = append $owners "media" -}}
{{- end -}}
{{- if .Values.gateway.enabled -}}
  {{- $owners = append $owners "gateway" -}}
{{- end -}}
{{- if .Values.jobs.enabled -}}
  {{- $owners = append $owners "jobs" -}}
{{- end -}}
{{- if .Values.test.enabled -}}
  {{- $owners = append $owners "test" -}}
{{- end -}}
{{- toJson $owners -}}
{{- end -}}

{{/*
The URIs in the certificate of a component or a group, which say what it may do (docs/security.md), as a JSON array.
Arguments: (list root plan component-or-group). Replicas are named like their pods, and `*` in a name stands for no "-":
omni-*-* does not match the pods of omni-private.
*/}}
{{- define "stagemesh.tlsUris" -}}
{{- $fullname := include "stagemesh.fullname" (index . 0) -}}
{{- $owner := index . 2 -}}
{{- $roles := dict "orchestrator" "orchestrator" "test" "client" -}}
{{- $group := get (index . 1).groups $owner -}}
{{- $uris := list -}}
{{- if and (eq $owner "gateway") (index . 0).Values.gateway.forwardTokens -}}
{{- /* It calls as its callers. */ -}}
{{- else if has $owner (list "gateway" "jobs") -}}
{{- $uris = list (printf "stagemesh://client/%s-%s" $fullname $owner) -}}
{{- else if hasKey $roles $owner -}}
{{- $uris = list (printf "stagemesh://%s/%s" (get $roles $owner) $fullname) -}}
{{- else if $group -}}
{{- range $tier := ternary (list "" "-warm") (list "") (gt (int $group.warm.replicas) 0) -}}
  {{- $workload := printf "%s-%s%s" $fullname $owner $tier -}}
  {{- $pods := list (printf "%s-*%s" $workload (ternary "" "-*" (gt (int $group.nodes) 1))) -}}
  {{- if gt (len $workload) 46 -}}
    {{- /* Kubernetes shortens such a name to 58 characters before it appends the random end of a pod's name. */ -}}
    {{- $pods = append $pods (printf "%s*" (trunc 58 (printf "%s-" $workload))) -}}
  {{- end -}}
  {{- range $pod := $pods -}}
    {{- range $stage := $group.stages -}}
      {{- $uris = append $uris (printf "stagemesh://stage/%s/%s%s" $stage $pod (ternary (printf "-%s" $stage) "" (gt (len $group.stages) 1))) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $uris -}}
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
