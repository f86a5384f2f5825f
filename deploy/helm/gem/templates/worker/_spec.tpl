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
  value: 0.0.0.0:9465
{{- end -}}

{{/* The part of the Job that can't be changed once it exists. */}}
{{- define "gem.worker.jobSpec" -}}
completionMode: {{ ternary "Indexed" "NonIndexed" .Values.worker.indexed }}
podFailurePolicy:
  # The first that fits. Other failures count towards backoffLimit, status 2 (a wrong option, task or data) too: one machine alone
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
  metadata:
    {{- include "gem.podMetadata" (dict "root" . "component" "worker") | nindent 4 }}
  spec:
    {{- include "gem.podSpec" . | nindent 4 }}
    restartPolicy: Never
    terminationGracePeriodSeconds: {{ .Values.worker.terminationGracePeriodSeconds }}
    {{- with include "gem.placement" .Values.worker | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    containers:
      - name: worker
        image: {{ include "gem.image" (dict "root" . "image" .Values.worker.image) | quote }}
        {{- include "gem.container" . | nindent 8 }}
        command: [gem-worker]
        {{- if .Values.worker.indexed }}
        # An argument, because Kubernetes adds this variable after those of `env`, which therefore can't refer to it.
        args: [--name, worker-$(JOB_COMPLETION_INDEX)]
        {{- end }}
        env:
          {{- $env := include "gem.worker.env" . }}
          {{- include "gem.env" (dict "env" $env "extra" .Values.worker.extraEnv "place" "worker.extraEnv") | nindent 10 }}
        ports:
          - name: metrics
            containerPort: 9465
        resources:
          {{- toYaml .Values.worker.resources | nindent 10 }}
        volumeMounts:
          {{- include "gem.clientMounts" (dict "root" . "role" "worker") | nindent 10 }}
          {{- with include "gem.taskMounts" . | trim }}
          {{- . | nindent 10 }}
          {{- end }}
    volumes:
      {{- include "gem.clientVolumes" (dict "root" . "role" "worker") | nindent 6 }}
      {{- with include "gem.taskVolumes" . | trim }}
      {{- . | nindent 6 }}
      {{- end }}
{{- end -}}
