{{/*
What the operator does in a namespace with RLJobs: verbs that it uses, no wildcard.
`create` beside `patch`: a server-side apply of what does not exist needs both.
*/}}
{{- define "streamrl.operatorRules" -}}
# The user's document: read, finalizer, and deletion after ttlSecondsAfterFinished.
- apiGroups: [streamrl.io]
  resources: [rljobs]
  verbs: [list, watch, patch, delete]
- apiGroups: [streamrl.io]
  resources: [rljobs/status, generatorpools/status]
  verbs: [patch]
# blockOwnerDeletion in owner references, where the cluster enforces it.
- apiGroups: [streamrl.io]
  resources: [rljobs/finalizers, generatorpools/finalizers]
  verbs: [update]
# The namespace's defaults, when a job begins.
- apiGroups: [streamrl.io]
  resources: [rljobdefaults]
  verbs: [get]
# What a job is made of.
- apiGroups: [streamrl.io]
  resources: [generatorpools]
  verbs: [get, list, watch, create, patch, delete]
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
  resources: [services, configmaps, secrets, serviceaccounts, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
# Restarts of the trainer as a group. `create` is for dry runs: what a StatefulSet may have, its pods may not.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, delete]
# Whether there is room for all pods of a job before the first is made.
- apiGroups: [""]
  resources: [resourcequotas]
  verbs: [list]
{{- if .Values.gangs.enabled }}
# Gangs of jobs that ask for a PodGroup.
- apiGroups: [scheduling.x-k8s.io, scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if eq .Values.numbers "Proxy" }}
# The schedulers' numbers, without a route to the pods. It is a GET to any port of any Service here.
- apiGroups: [""]
  resources: [services/proxy]
  verbs: [get]
{{- end }}
{{- if .Values.clusters.enabled }}
# The ways by which generators in member clusters come in through a Gateway.
- apiGroups: [gateway.networking.k8s.io]
  resources: [tlsroutes]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- if .Values.kueue.enabled }}
# Jobs in queues: their Workloads, and what Kueue waits for in the status.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
{{- end }}
{{- end -}}

{{/* What an admission names: it has no namespace. */}}
{{- define "streamrl.kueueClusterRules" -}}
- apiGroups: [kueue.x-k8s.io]
  resources: [resourceflavors, workloadpriorityclasses]
  verbs: [get]
- apiGroups: [scheduling.k8s.io]
  resources: [priorityclasses]
  verbs: [get]
{{- end -}}

{{/* Member clusters: which there are, what is known of them, and which cluster this one is. */}}
{{- define "streamrl.membersClusterRules" -}}
- apiGroups: [streamrl.io]
  resources: [rlclusters]
  verbs: [list, watch, patch]
- apiGroups: [streamrl.io]
  resources: [rlclusters/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [namespaces]
  resourceNames: [kube-system]
  verbs: [get]
- apiGroups: [multicluster.x-k8s.io]
  resources: [clusterprofiles]
  verbs: [get]
{{- end -}}

{{/* What the page of jobs reads: nothing is written, and no Secret seen. */}}
{{- define "streamrl.uiRules" -}}
- apiGroups: [streamrl.io]
  resources: [rljobs, generatorpools]
  verbs: [list]
- apiGroups: [""]
  resources: [events]
  verbs: [list]
{{- if .Values.ui.askSchedulers }}
# The schedulers' status. It is a GET to any port of any pod here, not of schedulers alone.
- apiGroups: [""]
  resources: [pods/proxy]
  verbs: [get]
{{- end }}
{{- end -}}

{{/* What the hook does before the release goes. */}}
{{- define "streamrl.uninstallRules" -}}
- apiGroups: [streamrl.io]
  resources: [rljobs, generatorpools]
  verbs: [list, patch]
{{- if and .Values.clusters.enabled (not .Values.watchNamespaces) }}
- apiGroups: [streamrl.io]
  resources: [rlclusters]
  verbs: [list, patch]
{{- end }}
{{- if eq .Values.uninstall.jobs "Delete" }}
- apiGroups: [streamrl.io]
  resources: [rljobs]
  verbs: [delete]
{{- end }}
{{- end -}}
