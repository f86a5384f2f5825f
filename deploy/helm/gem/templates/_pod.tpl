{{/*
What the user adds to a part of an object. Maps are merged. Lists of objects are joined, and an entry replaces one of the chart's with
the same name, or of a mount the same path. Everything else is replaced. Takes a list of two maps: the chart's and the user's.
*/}}
{{- define "gem.merged" -}}
{{- $result := deepCopy (first .) -}}
{{- range $key, $more := last . -}}
{{- $there := get $result $key -}}
{{- if and (kindIs "map" $there) (kindIs "map" $more) -}}
{{- $_ := set $result $key (include "gem.merged" (list $there $more) | fromJson) -}}
{{- else if and (kindIs "slice" $there) (kindIs "map" (first $more)) -}}
{{- $names := list "" -}}
{{- range $more }}{{ $names = append $names (.mountPath | default .name | default "") }}{{ end -}}
{{- $kept := list -}}
{{- range $there -}}
{{- $name := .mountPath | default .name | default "" -}}
{{- if or (not $name) (not (has $name $names)) }}{{ $kept = append $kept . }}{{ end -}}
{{- end -}}
{{- $_ := set $result $key (concat $kept $more) -}}
{{- else if not (and (kindIs "slice" $there) (kindIs "slice" $more) (not $more)) -}}
{{- $_ := set $result $key $more -}}
{{- end -}}
{{- end -}}
{{- toJson $result -}}
{{- end -}}

{{/*
A pod's template: the chart's, with what the values add to it. Takes a dict: "root"; "component"; "spec", the pod's spec as YAML.
*/}}
{{- define "gem.podTemplate" -}}
{{- $part := get .root.Values .component -}}
{{- $spec := include "gem.merged" (list (include "gem.podSpec" . | fromYaml) (fromYaml .spec)) | fromJson -}}
{{- $container := first $spec.containers -}}
{{- $names := list -}}
{{- range $container.env }}{{ $names = append $names .name }}{{ end -}}
{{- range $part.container.env -}}
{{- if has .name $names -}}
{{- fail (printf "%s.container.env: %s is set already, by the chart or by another entry: use the value of the chart, or remove one" $.component .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $_ := set $spec "containers" (list (include "gem.merged" (list $container $part.container) | fromJson)) -}}
metadata:
  {{- $metadata := include "gem.podMetadata" . | fromYaml }}
  {{- include "gem.merged" (list $metadata (pick $part.pod "labels" "annotations")) | fromJson | toYaml | nindent 2 }}
spec:
  {{- include "gem.merged" (list $spec (omit $part.pod "labels" "annotations")) | fromJson | toYaml | nindent 2 }}
{{- end -}}

{{/* Labels and annotations of a pod. Takes a dict: root and component. */}}
{{- define "gem.podMetadata" -}}
labels:
  {{- with .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "gem.selectorLabels" . | nindent 2 }}
annotations:
  # Other settings make other pods: of the settings, those that the pod's command knows.
  {{- $known := dict }}
  {{- range include (printf "gem.keys.%s" .component) . | fromJsonArray }}
  {{- if hasKey $.root.Values.config . }}{{ $_ := set $known . (get $.root.Values.config .) }}{{ end }}
  {{- end }}
  checksum/config: {{ $known | toJson | sha256sum | trunc 8 | quote }}
  {{- with .root.Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The name of a part's ServiceAccount. Takes a dict: root, and component. The pod of `helm test` is a client like a worker. */}}
{{- define "gem.serviceAccount" -}}
{{- $part := ternary "worker" .component (eq .component "test") -}}
{{ (get .root.Values $part).serviceAccount.name | default (printf "%s-%s" (include "gem.fullname" .root) $part) }}
{{- end -}}

{{/* What all pods have. Takes a dict: root and component. */}}
{{- define "gem.podSpec" -}}
serviceAccountName: {{ include "gem.serviceAccount" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false # Kubernetes would add variables such as GEM_SERVICE_HOST, and GEM_… are our options
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/*
What all containers have. Takes a dict: root; "image", one of the values' `image` sections; "command", a list of words. Process 1 is
tini: the kernel drops a SIGTERM that comes to process 1 before it has a handler. `kubectl describe` shows a failed container's last
lines.
*/}}
{{- define "gem.container" -}}
image: {{ include "gem.image" . | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: {{ concat (list "tini" "--") .command | toJson }}
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
{{- end -}}
