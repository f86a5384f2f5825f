{{/*
Helpers take the root context, or a dict: "root" is the root context, "component" the pods' part of the release (server, worker,
evaluator, test).
*/}}

{{/*
The name of all objects of the release, at most 40 characters: a Job's pods add 23 to it. A release may have dots in its name and
begin with a digit, a Service may not.
*/}}
{{- define "gem.fullname" -}}
{{- $root := .root | default . -}}
{{- $name := $root.Values.nameOverride | default $root.Chart.Name -}}
{{- $whole := ternary $root.Release.Name (printf "%s-%s" $root.Release.Name $name) (contains $name $root.Release.Name) -}}
{{- $whole = $root.Values.fullnameOverride | default $whole | replace "." "-" | trunc 40 -}}
{{- if not (regexMatch "^[a-z]" $whole) -}}
{{- fail (printf "Kubernetes refuses a Service named %s: name the release so that it begins with a letter, or set fullnameOverride" $whole) -}}
{{- end -}}
{{- regexReplaceAll "-+$" $whole "" -}}
{{- end -}}

{{/* "true" if several servers hold the model together, each a range of it; empty if one holds everything. */}}
{{- define "gem.severalServers" -}}
{{- if gt (int .Values.server.ranges) 1 }}true{{ end -}}
{{- end -}}

{{/*
The name of a server's pod in DNS, for clients in every namespace. Takes a dict: root, and index, the range that the server holds.
The pod of range 0 leads.
*/}}
{{- define "gem.serverHost" -}}
{{- $name := include "gem.fullname" .root -}}
{{ $name }}-server-{{ .index }}.{{ $name }}-headless.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{/* The labels that selectors use. They never change in an upgrade. */}}
{{- define "gem.selectorLabels" -}}
{{- $root := .root | default . -}}
app.kubernetes.io/name: {{ $root.Values.nameOverride | default $root.Chart.Name | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* All labels of an object. */}}
{{- define "gem.labels" -}}
{{- $root := .root | default . -}}
{{- with $root.Values.commonLabels }}{{ toYaml . }}{{ "\n" }}{{ end -}}
{{ include "gem.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{/* The name of an image. Takes a dict: root, and image, one of the values' `image` sections. */}}
{{- define "gem.image" -}}
{{- $common := .root.Values.image -}}
{{- with .image.registry | default $common.registry }}{{ . | trimSuffix "/" }}/{{ end -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default $common.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* A value in TOML. JSON's texts, numbers, true and false are TOML's as well; a map becomes an inline table. */}}
{{- define "gem.toml" -}}
{{- if kindIs "map" . -}}
{ {{- range $index, $key := keys . | sortAlpha }}{{ if $index }},{{ end }} {{ $key }} = {{ get $ $key | toJson }}{{ end }} }
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end -}}

{{/* The file of settings. */}}
{{- define "gem.config" -}}
{{- range $key, $value := .Values.config }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "gem.toml" $value }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "gem.configEnv" -}}
- name: GEM_CONFIG
  value: /etc/gem/config/run.toml
{{- end -}}

{{- define "gem.configMount" -}}
- name: config
  mountPath: /etc/gem/config
  readOnly: true
{{- end -}}

{{- define "gem.configVolume" -}}
- name: config
  configMap:
    name: {{ include "gem.fullname" . }}-config
{{- end -}}

{{- define "gem.tokenSecret" -}}
{{ .Values.auth.existingSecret | default (printf "%s-tokens" (include "gem.fullname" .)) }}
{{- end -}}

{{/* Who makes the server's certificate: user, cert-manager or chart; empty without TLS. */}}
{{- define "gem.tlsSource" -}}
{{- $given := list -}}
{{- if .Values.tls.existingSecret }}{{ $given = append $given "user" }}{{ end -}}
{{- if .Values.tls.certManager.enabled }}{{ $given = append $given "cert-manager" }}{{ end -}}
{{- if gt (len $given) 1 -}}
{{- fail "tls.existingSecret and tls.certManager.enabled contradict each other: set one of them" -}}
{{- end -}}
{{- if and $given (not .Values.tls.enabled) -}}
{{- fail "tls.enabled is false, but tls names a certificate: set tls.enabled to true, or remove the rest" -}}
{{- end -}}
{{- if .Values.tls.enabled }}{{ first (append $given "chart") }}{{ end -}}
{{- end -}}

{{/* The Secret with the server's certificate; empty without TLS. */}}
{{- define "gem.tlsSecret" -}}
{{- if include "gem.tlsSource" . -}}
{{ .Values.tls.existingSecret | default (printf "%s-tls" (include "gem.fullname" .)) }}
{{- end -}}
{{- end -}}

{{/* The names in the server's certificate: those that clients use, and those of gem-ctl in the server's pod. A JSON list. */}}
{{- define "gem.certificateNames" -}}
{{- $name := include "gem.fullname" . -}}
{{- $names := list "localhost" $name -}}
{{- range list .Release.Namespace (printf "%s.svc" .Release.Namespace) (printf "%s.svc.cluster.local" .Release.Namespace) -}}
{{- $names = append $names (printf "%s.%s" $name .) -}}
{{- end -}}
{{- if include "gem.severalServers" . -}}
{{- range $index := until (int .Values.server.ranges) -}}
{{- $names = append $names (include "gem.serverHost" (dict "root" $ "index" $index)) -}}
{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/*
An annotation of the Secrets that the chart makes up. They would be made up anew at each rendering without the cluster's own, which
Argo CD has not. So it leaves them out, and pods wait for a Secret that the user makes.
*/}}
{{- define "gem.madeUpSecret" -}}
argocd.argoproj.io/hook: Skip
{{- end -}}

{{/* The environment of a client of the server. Takes a dict: root and role, a key of the Secret with the tokens. */}}
{{- define "gem.clientEnv" -}}
- name: GEM_SERVER
  value: {{ include "gem.fullname" .root }}:50051
{{- if .root.Values.auth.enabled }}
- name: GEM_TOKEN_FILE
  value: /etc/gem/auth/{{ .role }}
{{- end }}
{{- if include "gem.tlsSecret" .root }}
- name: GEM_TLS_CA
  value: /etc/gem/tls/ca.crt
{{- end }}
{{- end -}}

{{- define "gem.clientMounts" -}}
- name: tmp
  mountPath: /tmp
{{- if .root.Values.auth.enabled }}
- name: auth
  mountPath: /etc/gem/auth
  readOnly: true
{{- end }}
{{- if include "gem.tlsSecret" .root }}
- name: tls
  mountPath: /etc/gem/tls
  readOnly: true
{{- end }}
{{- end -}}

{{/* The volumes of a client: its own token and the authority's certificate, nothing else of the two Secrets. */}}
{{- define "gem.clientVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 10Gi
{{- if .root.Values.auth.enabled }}
- name: auth
  secret:
    secretName: {{ include "gem.tokenSecret" .root | quote }}
    defaultMode: 0440 # the group is fsGroup; the commands refuse a token that others can read
    items:
      - key: {{ .role }}
        path: {{ .role }}
{{- end }}
{{- with include "gem.tlsSecret" .root }}
- name: tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
    items:
      - key: ca.crt
        path: ca.crt
{{- end }}
{{- end -}}

{{/* What workers and the evaluator share: the task and its data. */}}
{{- define "gem.taskEnv" -}}
{{ include "gem.configEnv" . }}
- name: GEM_TASK
  value: {{ .Values.worker.task | quote }}
{{- if .Values.worker.data.existingClaim }}
- name: GEM_DATA
  value: /data
{{- end }}
{{- end -}}

{{- define "gem.taskMounts" -}}
{{ include "gem.configMount" . }}
{{- if .Values.worker.data.existingClaim }}
- name: data
  mountPath: /data
  readOnly: true
{{- end }}
{{- end -}}

{{- define "gem.taskVolumes" -}}
{{ include "gem.configVolume" . }}
{{- with .Values.worker.data.existingClaim }}
- name: data
  persistentVolumeClaim:
    claimName: {{ . | quote }}
    readOnly: true
{{- end }}
{{- end -}}
