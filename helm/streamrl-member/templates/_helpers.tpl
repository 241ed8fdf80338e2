{{- define "streamrl-member.labels" -}}
app.kubernetes.io/name: streamrl-member
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* Unique to the release: several home clusters may use this one. */}}
{{- define "streamrl-member.name" -}}
{{ printf "streamrl-member-%s" (printf "%s/%s" .Release.Namespace .Release.Name | sha256sum | trunc 8) }}
{{- end -}}

{{/*
What the operator of the home cluster does in a namespace here: verbs that it uses, no wildcard, nothing outside of the namespace; the proxy is for trainers' numbers alone.
`create` beside `patch`: a server-side apply of what does not exist needs both.
*/}}
{{- define "streamrl-member.rules" -}}
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, secrets, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
{{- if .Values.trainers }}
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services/proxy]
  verbs: [get]
{{- end }}
{{- end -}}
