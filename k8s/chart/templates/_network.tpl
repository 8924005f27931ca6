{{/* Rules for TCP ports as a list of one rule's ports. Argument: the port numbers. */}}
{{- define "stagemesh.tcpPorts" -}}
{{- range $index, $port := . -}}
{{- if $index }}
{{ end -}}
- protocol: TCP
  port: {{ int64 $port }}
{{- end -}}
{{- end -}}

{{/* The ports on which stages accept steps and the data of edges. Argument: the plan. */}}
{{- define "stagemesh.stagePorts" -}}
{{- $ports := list -}}
{{- range $name, $stage := .stages -}}
  {{- $ports = append $ports (int64 $stage.port) -}}
{{- end -}}
{{- include "stagemesh.tcpPorts" (uniq $ports) -}}
{{- end -}}

{{/* The ports of external stages. Argument: the plan. */}}
{{- define "stagemesh.externalPorts" -}}
{{- $ports := list -}}
{{- range $name, $service := .external -}}
  {{- $ports = append $ports (int64 $service.port) -}}
{{- end -}}
{{- include "stagemesh.tcpPorts" (uniq $ports) -}}
{{- end -}}

{{/* The ports of the data plane between stages: those of stages, and those of UCX. Arguments: (list root plan). */}}
{{- define "stagemesh.dataPorts" -}}
{{- $root := index . 0 -}}
{{- include "stagemesh.stagePorts" (index . 1) }}
{{- range $name, $stage := (index . 1).stages -}}
  {{- if $stage.nixl -}}
    {{- $range := splitList "-" $root.Values.networkPolicy.ucxPortRange -}}
    {{- printf "\n- protocol: TCP\n  port: %s\n  endPort: %s" (first $range) (last $range) -}}
    {{- break -}}
  {{- end -}}
{{- end -}}
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
- to:
    {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  ports:
    - protocol: UDP
      port: 53
    - protocol: TCP
      port: 53
{{- with .Values.otlp.endpoint }}
- ports:
    - protocol: TCP
      port: {{ regexFind "[0-9]+$" (trimSuffix "/" (urlParse .).host) | default (ternary "443" "4317" (hasPrefix "https:" .)) }}
{{- end }}
{{- end -}}
