{{/* Refuses values that a schema can't: those that contradict each other. */}}
{{- define "gem.checks" -}}
{{- if and .Values.config.until_stopped (or .Values.config.epochs .Values.config.steps) }}
{{- fail "config.until_stopped contradicts a limit: set config.epochs and config.steps to 0" }}
{{- end }}
{{- if not (or .Values.config.until_stopped .Values.config.epochs .Values.config.steps) }}
{{- fail "the run has no limit: set config.epochs or config.steps, or config.until_stopped to true" }}
{{- end }}
{{- if include "gem.severalServers" . }}
{{- if ne .Values.config.durability "log" }}
{{- fail "server.ranges needs config.durability: log, so that a server that is replaced has every commit that the others have" }}
{{- end }}
{{- if not .Values.server.persistence.enabled }}
{{- fail "server.ranges needs server.persistence.enabled: the part of a server without a disk would be lost with its pod, and with it the run" }}
{{- end }}
{{- if .Values.server.persistence.existingClaim }}
{{- fail "server.persistence.existingClaim is one disk, and server.ranges needs one for each server: leave it empty" }}
{{- end }}
{{- end }}
{{- if and .Values.worker.indexed (not .Values.worker.parallelism) }}
{{- fail "worker.parallelism is 0, which would complete an Indexed Job for good: set it to at least 1, or worker.indexed to false" }}
{{- end }}
{{- if and .Values.config.steps (not .Values.worker.indexed) }}
{{- fail "config.steps needs worker.indexed: true: without it the Job would start no worker after the first one that has taken its steps" }}
{{- end }}
{{- with .Values.worker.autoscaling }}
{{- if and .enabled $.Values.worker.indexed }}
{{- fail "worker.autoscaling scales a Deployment, whose pods have no numbers: set worker.indexed to false" }}
{{- end }}
{{- if and .enabled (not $.Values.metrics.serviceMonitor.enabled) }}
{{- fail "worker.autoscaling asks Prometheus how busy the workers are: set metrics.serviceMonitor.enabled to true" }}
{{- end }}
{{- if and .enabled (gt (int .min) (int $.Values.worker.parallelism)) }}
{{- fail "worker.autoscaling.min is more than worker.parallelism, the largest number of workers" }}
{{- end }}
{{- end }}
{{- $memory := dig "limits" "memory" "" .Values.server.resources }}
{{- $limit := .Values.config.memory_limit }}
{{- if and $memory $limit }}
{{- /* In a setting K, M, G and T are powers of 1024, whatever follows. */}}
{{- $given := regexReplaceAll "([KMGT])I?B?$" (toString $limit | upper | trimSuffix "B") "${1}i" }}
{{- if gt (include "gem.bytes" $given | float64) (include "gem.bytes" $memory | float64) }}
{{- fail (printf "config.memory_limit (%v) is more than server.resources.limits.memory (%v): the server's container would be killed. Leave it out for four fifths of the limit" $limit $memory) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The number of a quantity of Kubernetes, such as 2Gi, 1500M, 128e6 or 5. */}}
{{- define "gem.bytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+([eE][-+]?[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $powers := dict "k" 1 "M" 2 "G" 3 "T" 4 "P" 5 "E" 6 -}}
{{- $factor := ternary 0.001 1.0 (eq $unit "m") -}}
{{- range until (get $powers (trimSuffix "i" $unit | replace "K" "k") | default 0 | int) -}}
{{- $factor = mulf $factor (ternary 1024 1000 (hasSuffix "i" $unit)) -}}
{{- end -}}
{{- mulf (float64 $number) $factor -}}
{{- end -}}
