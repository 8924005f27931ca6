{{/*
Everything that the templates derive from the values, as JSON. Refuses wrong values.
- stages: the settings of each stage that the chart starts, with its group, ports and pipeline entry, and with `nixl` if
  one of its edges may use the connector nixl
- groups: the settings of each group's pods, with the names of its stages
- external: the host and port of each external stage's Service
- addresses: the host, port and stage of each address at which the pipeline names a replica of an external stage
- generation, topology: the names of the release's generation and of its topology
*/}}
{{- define "stagemesh.plan" -}}
{{- include "stagemesh.validateNames" . -}}
{{- $plan := dict "stages" dict "groups" dict "external" dict "addresses" list -}}
{{- $podKeys := splitList " " (include "stagemesh.podKeys" .) -}}
{{- range $name, $entry := .Values.pipeline.stages -}}
  {{- $own := get $.Values.stages $name | default dict -}}
  {{- if eq $entry.engine "external" -}}
    {{- with $own.external -}}
      {{- $host := ternary .service (include "stagemesh.serviceHost" (list $ .service)) (contains "." .service) -}}
      {{- $_ := set $plan.external $name (dict "host" $host "port" .port) -}}
    {{- end -}}
    {{- range $address := $entry.addresses -}}
      {{- $port := regexFind "[0-9]+$" $address -}}
      {{- $host := trimSuffix (printf ":%s" $port) $address | trimPrefix "[" | trimSuffix "]" -}}
      {{- /* The chart cannot read an address with a variable. */ -}}
      {{- if not (contains "${" $address) -}}
        {{- $_ := set $plan "addresses" (append $plan.addresses (dict "stage" $name "host" $host "port" $port)) -}}
      {{- end -}}
    {{- end -}}
  {{- else -}}
    {{- $stage := mergeOverwrite (deepCopy $.Values.stageDefaults) (deepCopy $own) -}}
    {{- $images := list $.Values.images.stage $.Values.stageDefaults.image ($own.image | default dict) -}}
    {{- $_ := set $stage "image" (include "stagemesh.mergeImages" $images | fromJson) -}}
    {{- $_ := set $stage "entry" $entry -}}
    {{- $_ := set $stage "group" ($entry.group | default $name) -}}
    {{- $_ := set $stage "arenaBytes" (dig "data_plane" "arena_bytes" 67108864 $entry) -}}
    {{- $_ := set $plan.stages $name $stage -}}
    {{- $group := get $plan.groups $stage.group | default (dict "stages" list) -}}
    {{- $_ := set $group "stages" (append $group.stages $name) -}}
    {{- $_ := set $plan.groups $stage.group $group -}}
  {{- end -}}
{{- end -}}
{{- range $name, $group := $plan.groups -}}
  {{- $layers := list (get $.Values.groups $name | default dict) -}}
  {{- if eq (len $group.stages) 1 -}}
    {{- $layers = prepend $layers (get $.Values.stages (first $group.stages) | default dict) -}}
  {{- end -}}
  {{- $pod := deepCopy $.Values.stageDefaults -}}
  {{- range $layer := $layers -}}
    {{- /* A source of the model cache replaces the default source instead of being merged with it. */ -}}
    {{- range $key := splitList " " (include "stagemesh.cacheSources" $) -}}
      {{- if hasKey ($layer.modelCache | default dict) $key -}}
        {{- $_ := set $pod "modelCache" (omit $pod.modelCache "existingClaim" "claim" "hostPath" "none") -}}
      {{- end -}}
    {{- end -}}
    {{- $pod = mergeOverwrite $pod (deepCopy $layer) -}}
  {{- end -}}
  {{- range $key := $podKeys -}}
    {{- if hasKey $pod $key -}}
      {{- $_ := set $group $key (get $pod $key) -}}
    {{- end -}}
  {{- end -}}
  {{- $shmBytes := 0 -}}
  {{- range $index, $stageName := $group.stages -}}
    {{- $stage := get $plan.stages $stageName -}}
    {{- if not (hasKey $group "replicas") -}}
      {{- $_ := set $group "replicas" (dig "replicas" 1 $stage.entry) -}}
    {{- end -}}
    {{- /* The port depends on the name alone, so that it remains if the group gets further stages. */ -}}
    {{- $offset := ternary 0 (mod (adler32sum $stageName) 100) (eq (len $group.stages) 1) -}}
    {{- $_ := set $stage "port" ($stage.port | default (add 50051 $offset)) -}}
    {{- /* With TLS, the probes of the kubelet need a port of their own, because they have no certificate. */ -}}
    {{- $_ := set $stage "healthPort" (ternary (add 8090 $index) $stage.port $.Values.tls.enabled) -}}
    {{- $_ := set $stage "metricsPort" (add 9464 $index) -}}
    {{- /* The names of ports are unique in a pod. */ -}}
    {{- $_ := set $stage "portName" (ternary "grpc" (printf "grpc-%d" (add1 $index)) (eq $index 0)) -}}
    {{- $shmBytes = add $shmBytes $stage.shmBytes $stage.arenaBytes -}}
    {{- $_ := set $group "nodes" ($stage.multiNode.nodes | max ($group.nodes | default 1)) -}}
  {{- end -}}
  {{- $_ := set $group "shmBytes" $shmBytes -}}
{{- end -}}
{{- range .Values.pipeline.edges -}}
  {{- /* Orchestrators send the input that clients stream, and only by grpc. */ -}}
  {{- if and (ne .from "@input") (has (.connector | default "auto") (list "auto" "nixl")) -}}
    {{- range $name := list .from .to -}}
      {{- with get $plan.stages $name -}}
        {{- $_ := set . "nixl" true -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $_ := set $plan "topology" (include "stagemesh.topology" (list . $plan)) -}}
{{- $_ := set $plan "generation" (printf "%s-%s" $plan.topology (include "stagemesh.specHash" (list . $plan))) -}}
{{- include "stagemesh.validatePlan" (list . $plan) -}}
{{- toJson $plan -}}
{{- end -}}

{{/*
Six digits that change when an orchestrator of the old pipeline could not plan requests on stages of the new one: with
the stages, what they run, how they are connected, and the ports at which orchestrators look for them.
Arguments: (list root plan).
*/}}
{{- define "stagemesh.topology" -}}
{{- $pipeline := (index . 0).Values.pipeline -}}
{{- $stages := dict -}}
{{- range $name, $entry := $pipeline.stages -}}
  {{- $_ := set $stages $name (pick $entry "engine" "function" "signature" "join" "when") -}}
{{- end -}}
{{- $ports := dict -}}
{{- range $name, $stage := (index . 1).stages -}}
  {{- $_ := set $ports $name $stage.port -}}
{{- end -}}
{{- $edges := list -}}
{{- range $pipeline.edges -}}
  {{- $edges = append $edges . -}}
{{- end -}}
{{- /* An orchestrator without TLS cannot call stages with TLS. */ -}}
{{- if (index . 0).Values.tls.enabled -}}
  {{- $_ := set $ports "tls" true -}}
{{- end -}}
{{- dict "stages" $stages "ports" $ports "edges" $edges "outputs" ($pipeline.outputs | default dict) "options" ($pipeline.options | default dict) | toJson | sha256sum | trunc 6 -}}
{{- end -}}

{{/* Six digits that change when a stage computes something else, or with another program. Arguments: (list root plan). */}}
{{- define "stagemesh.specHash" -}}
{{- $root := index . 0 -}}
{{- $specs := dict -}}
{{- range $name, $stage := (index . 1).stages -}}
  {{- $spec := pick $stage.entry "model" "options" "data_plane" -}}
  {{- /* Variables of the pipeline file take their values from the environment. */ -}}
  {{- $_ := set $spec "env" $stage.env -}}
  {{- $_ := set $spec "image" (include "stagemesh.image" (list $root $stage.image)) -}}
  {{- $_ := set $spec "modelRevision" ($stage.modelRevision | default "") -}}
  {{- $_ := set $specs $name $spec -}}
{{- end -}}
{{- toJson $specs | sha256sum | trunc 6 -}}
{{- end -}}
