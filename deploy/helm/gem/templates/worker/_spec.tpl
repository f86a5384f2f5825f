{{- define "gem.worker.env" -}}
{{ include "gem.clientEnv" (dict "root" . "role" "worker") }}
{{- with include "gem.taskEnv" . | trim }}
{{ . }}
{{- end }}
{{- if not .Values.worker.indexed }}
- name: GEM_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end }}
- name: GEM_STOPPED_STATUS # 0 would tell the Job that the run is done
  value: "143"
- name: GEM_SHARED_MEMORY # pods share no memory
  value: "false"
- name: GEM_WORKER_METRICS_LISTEN
  value: '[::]:9465'
{{- end -}}

{{/* Takes a dict: root and restartPolicy. */}}
{{- define "gem.worker.podSpec" -}}
{{- $restart := .restartPolicy -}}
{{- with .root -}}
{{- $client := dict "root" . "role" "worker" -}}
restartPolicy: {{ $restart }}
terminationGracePeriodSeconds: {{ .Values.worker.terminationGracePeriodSeconds }}
containers:
  - name: worker
    {{- include "gem.container" (dict "root" . "image" .Values.worker.image "command" (list "gem-worker")) | nindent 4 }}
    {{- if .Values.worker.indexed }}
    # An argument, because Kubernetes adds this variable after those of `env`, which therefore can't refer to it.
    args: [--name, worker-$(JOB_COMPLETION_INDEX)]
    {{- end }}
    env:
      {{- include "gem.worker.env" . | trim | nindent 6 }}
    ports:
      - name: metrics
        containerPort: 9465
    resources:
      {{- toYaml .Values.worker.resources | nindent 6 }}
    volumeMounts:
      {{- include "gem.clientMounts" $client | nindent 6 }}
      {{- include "gem.taskMounts" . | trim | nindent 6 }}
volumes:
  {{- include "gem.clientVolumes" $client | nindent 2 }}
  {{- include "gem.taskVolumes" . | trim | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* The pods of the Job, which don't restart, or of the Deployment, which do. Takes a dict: root and restartPolicy. */}}
{{- define "gem.worker.podTemplate" -}}
{{- include "gem.podTemplate" (dict "root" .root "component" "worker" "spec" (include "gem.worker.podSpec" .)) -}}
{{- end -}}

{{/* The part of the Job that can't be changed once it exists. */}}
{{- define "gem.worker.jobSpec" -}}
completionMode: {{ ternary "Indexed" "NonIndexed" .Values.worker.indexed }}
{{- if .Values.worker.indexed }}
# Of each number, so that a pod's replacement does not wait because of other pods.
backoffLimitPerIndex: {{ .Values.worker.backoffLimit | int64 }}
{{- end }}
podFailurePolicy:
  # The first that fits. Other failures count towards the limit, status 2 (a wrong option, task or data) too: one machine alone
  # may have it, such as one whose GPU does not work.
  rules:
    - action: Ignore # evicted: a drained node, a spot machine taken back
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
    - action: Ignore # stopped by SIGTERM before the run was done
      onExitCodes:
        containerName: worker
        operator: In
        values: [143]
template:
  {{- include "gem.worker.podTemplate" (dict "root" . "restartPolicy" "Never") | nindent 2 }}
{{- end -}}
