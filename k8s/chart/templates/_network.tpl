{{/* Rules for TCP ports as a list of one rule's ports. Argument: the port numbers. */}}
{{- define "stagemesh.tcpPorts" -}}
{{- range $index, $port := . -}}
{{- if $index }}
{{ end -}}
- protocol: TCP
  port: {{ int64 $port }}
{{- end -}}
{{- end -}}

{{/* A range of ports FIRST-LAST as a list of one rule's ports. */}}
{{- define "stagemesh.portRange" -}}
{{- $ports := splitList "-" . -}}
- protocol: TCP
  port: {{ first $ports }}
  endPort: {{ last $ports }}
{{- end -}}

{{/* The host and port of each external stage's Service and addresses, as a JSON array. Argument: the plan. */}}
{{- define "stagemesh.externalEndpoints" -}}
{{- $endpoints := .addresses -}}
{{- range $name, $service := .external -}}
  {{- $endpoints = append $endpoints $service -}}
{{- end -}}
{{- toJson $endpoints -}}
{{- end -}}

{{/* Not empty if a host is an IP address. */}}
{{- define "stagemesh.isIp" -}}
{{- if or (contains ":" .) (regexMatch "^[0-9.]+$" .) }}true{{ end -}}
{{- end -}}

{{/*
The egress rules for external stages: to the peers that the values name, at the ports of external stages, and to the IP
addresses in the pipeline. Arguments: (list root plan).
*/}}
{{- define "stagemesh.externalEgress" -}}
{{- $ports := list -}}
{{- $rules := list -}}
{{- range include "stagemesh.externalEndpoints" (index . 1) | fromJsonArray -}}
  {{- if include "stagemesh.isIp" .host -}}
    {{- $rules = append $rules (dict "to" (list (include "stagemesh.ipPeer" .host | fromYaml)) "ports" (list (dict "protocol" "TCP" "port" (int64 .port)))) -}}
  {{- else -}}
    {{- $ports = append $ports (int64 .port) -}}
  {{- end -}}
{{- end -}}
{{- $peers := (index . 0).Values.networkPolicy.externalStages -}}
{{- if and $ports $peers -}}
  {{- $rules = prepend $rules (dict "to" $peers "ports" (include "stagemesh.tcpPorts" (uniq $ports) | fromYamlArray)) -}}
{{- end -}}
{{- with $rules }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{/* The peers that external stages are: those that the values name, and the IP addresses in the pipeline. Arguments: (list root plan). */}}
{{- define "stagemesh.externalPeers" -}}
{{- $peers := list -}}
{{- $named := false -}}
{{- range include "stagemesh.externalEndpoints" (index . 1) | fromJsonArray -}}
  {{- if include "stagemesh.isIp" .host -}}
    {{- $peers = append $peers (include "stagemesh.ipPeer" .host | fromYaml) -}}
  {{- else -}}
    {{- $named = true -}}
  {{- end -}}
{{- end -}}
{{- if $named -}}
  {{- $peers = concat $peers (index . 0).Values.networkPolicy.externalStages -}}
{{- end -}}
{{- with $peers }}
{{- toYaml (uniq .) }}
{{- end }}
{{- end -}}

{{/* The peer with one IP address. */}}
{{- define "stagemesh.ipPeer" -}}
ipBlock:
  cidr: {{ printf "%s/%d" . (ternary 128 32 (contains ":" .)) | quote }}
{{- end -}}

{{/* The peer that consists of a component's pods. Arguments: (list root component [group]). */}}
{{- define "stagemesh.podPeer" -}}
- podSelector:
    matchLabels:
      {{- include "stagemesh.selector" . | nindent 6 }}
{{- end -}}

{{/* The peer that consists of all pods of a namespace. Argument: its name. */}}
{{- define "stagemesh.namespacePeer" -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ . | quote }}
{{- end -}}

{{/* The egress rules that every pod needs: DNS, and the OTLP collector. Argument: the root. */}}
{{- define "stagemesh.commonEgress" -}}
{{- /* A rule with an empty list of peers would permit every peer. */ -}}
{{- with .Values.networkPolicy.dns -}}
- to:
    {{- toYaml . | nindent 4 }}
  ports:
    - protocol: UDP
      port: 53
    - protocol: TCP
      port: 53
{{- end }}
{{- with .Values.otlp.endpoint }}
- to:
    {{- include "stagemesh.collectorPeers" $ | nindent 4 }}
  ports:
    - protocol: TCP
      port: {{ regexFind "[0-9]+$" (trimSuffix "/" (urlParse .).host) | default (ternary "443" "4317" (hasPrefix "https:" .)) }}
{{- end }}
{{- end -}}

{{/*
The peers that the OTLP collector is: those that the values name, else those that its host in the endpoint names, which is
an IP address, or a Service with or without its namespace. Empty if neither names any. Argument: the root.
*/}}
{{- define "stagemesh.collectorPeers" -}}
{{- $host := (urlParse .Values.otlp.endpoint).hostname -}}
{{- $names := splitList "." $host -}}
{{- if .Values.networkPolicy.collector -}}
{{- toYaml .Values.networkPolicy.collector -}}
{{- else if include "stagemesh.isIp" $host -}}
- {{ include "stagemesh.ipPeer" $host | nindent 2 | trim }}
{{- else if and $host (eq (len $names) 1) -}}
- podSelector: {}
{{- else if or (eq (len $names) 2) (and (gt (len $names) 2) (eq (index $names 2) "svc")) -}}
{{- include "stagemesh.namespacePeer" (index $names 1) -}}
{{- end -}}
{{- end -}}

{{- /* "true" if Prometheus scrapes the pods. Arguments: the root. */ -}}
{{- define "stagemesh.isMonitored" -}}
{{- if or .Values.monitoring.serviceMonitor.enabled .Values.monitoring.podMonitor.enabled }}true{{ end -}}
{{- end -}}

{{- /* The ports at which the stages serve metrics, as a JSON array. Arguments: the plan. */ -}}
{{- define "stagemesh.metricsPorts" -}}
{{- $ports := list -}}
{{- range $stage := .stages -}}
  {{- $ports = append $ports (int64 $stage.metricsPort) -}}
{{- end -}}
{{- $ports | uniq | sortAlpha | toJson -}}
{{- end -}}
