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

{{/* The URI in a component's certificate, which says what it may do (docs/security.md). Arguments: (list root component-or-group). */}}
{{- define "stagemesh.tlsUri" -}}
{{- $fullname := include "stagemesh.fullname" (index . 0) -}}
{{- $owner := index . 1 -}}
{{- $roles := dict "orchestrator" "orchestrator" "test" "client" -}}
{{- $forwards := and (eq $owner "gateway") (index . 0).Values.gateway.forwardTokens -}}
{{- if $forwards -}}
{{- /* It calls as its callers. */ -}}
{{- else if has $owner (list "gateway" "jobs") -}}
stagemesh://client/{{ $fullname }}-{{ $owner }}
{{- else if hasKey $roles $owner -}}
stagemesh://{{ get $roles $owner }}/{{ $fullname }}
{{- else if ne $owner "media" -}}
{{- /* Replicas are named like their pods, whose names begin with that of their workload. The media service calls nobody. */ -}}
stagemesh://stage/{{ $fullname }}-{{ $owner }}-*
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
