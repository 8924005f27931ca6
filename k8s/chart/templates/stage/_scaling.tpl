{{/* The workload that an autoscaler scales. Arguments: (list name group). */}}
{{- define "stagemesh.workloadReference" -}}
{{- if gt (int (index . 1).nodes) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ index . 0 | quote }}
{{- end -}}

{{/* How fast an autoscaler acts. A removed replica drains, but its model takes long to load again. Argument: autoscaling. */}}
{{- define "stagemesh.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown:
  stabilizationWindowSeconds: {{ int64 .cooldownSeconds }}
  policies:
    - type: Pods
      value: 1
      periodSeconds: 60
{{- end -}}
