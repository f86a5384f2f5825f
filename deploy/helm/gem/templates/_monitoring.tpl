{{/* The run in metrics and alerts: the label `run`. */}}
{{- define "gem.run" -}}
{{ .Release.Namespace }}/{{ .Release.Name }}
{{- end -}}

{{/*
A target's labels, as alerts and dashboards expect them. The operator's own `job` is the name of the Service or the monitor, and
its `instance` an address that changes with each pod. "root": the root context; "job": gem-server or gem-worker.
*/}}
{{- define "gem.targetLabels" -}}
- targetLabel: job
  replacement: {{ .job }}
- targetLabel: run
  replacement: {{ include "gem.run" .root }}
- targetLabel: instance
  sourceLabels: [__meta_kubernetes_namespace, __meta_kubernetes_pod_name]
  separator: /
{{- end -}}
