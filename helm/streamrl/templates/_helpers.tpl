{{/* Names and labels. */}}
{{- define "streamrl.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "streamrl.fullname" -}}
{{- $name := include "streamrl.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Cluster-scoped names carry the release's namespace: two releases in two namespaces may have one name. */}}
{{- define "streamrl.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "streamrl.fullname" .) -}}
{{- end -}}

{{- define "streamrl.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "streamrl.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "streamrl.selector" -}}
app.kubernetes.io/name: {{ include "streamrl.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "streamrl.labels" -}}
app.kubernetes.io/name: {{ include "streamrl.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: streamrl
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (replace "+" "_" .Chart.Version) }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* "streamrl.image" (list $ .Values.images.operator). A name without a registry would be pulled from a public one, where it is anybody's. */}}
{{- define "streamrl.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}{{- $name := $image.repository -}}
{{- if not (regexMatch "^(localhost|[^/]*[.:][^/]*)/" $name) -}}
{{- if not $root.Values.images.registry -}}
{{- fail (printf "images.registry: is required for the image %q, which names no registry; set it to where your images are: --set images.registry=registry.example.com/rl" $name) -}}
{{- end -}}
{{- $name = printf "%s/%s" (trimSuffix "/" $root.Values.images.registry) $name -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* What the level "restricted" of Pod Security asks of a pod, and of a container. */}}
{{- define "streamrl.podSecurity" -}}
runAsNonRoot: true
{{- if .Values.security.setUser }}
runAsUser: 10001
runAsGroup: 10001
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "streamrl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where the operator and the page go. */}}
{{- define "streamrl.egress" -}}
# Names. Not by pod labels: where the cluster's DNS runs, as a pod or on the node, is not ours to know.
- ports:
  - {port: 53, protocol: UDP}
  - {port: 53, protocol: TCP}
# The API server.
- ports:
  {{- range .Values.networkPolicy.apiServer.ports }}
  - {port: {{ . }}, protocol: TCP}
  {{- end }}
  {{- with .Values.networkPolicy.apiServer.cidrs }}
  to:
  {{- range . }}
  - ipBlock: {cidr: {{ . | quote }}}
  {{- end }}
  {{- end }}
{{- with .Values.networkPolicy.extraEgress }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{/* The page's pods, and the secret that it cannot be without. */}}
{{- define "streamrl.uiSelector" -}}
app.kubernetes.io/name: {{ include "streamrl.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: ui
{{- end -}}

{{- define "streamrl.uiTokenSecret" -}}
{{- if not .Values.ui.tokenSecret -}}
{{- fail (printf "ui.tokenSecret: is required where ui.enabled is true; name a Secret of namespace %s: kubectl create secret generic streamrl-ui -n %s --from-literal=token=\"$(openssl rand -base64 24)\"" .Release.Namespace .Release.Namespace) -}}
{{- end -}}
{{- .Values.ui.tokenSecret -}}
{{- end -}}

{{/* Annotations of what is made for the uninstallation, with its weight. */}}
{{- define "streamrl.uninstallHook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
