{{/* Names of objects: see docs/adr/0035-a-release-and-its-names.md. */}}

{{/* At most 31 characters (checks.yaml). With a group's name of 20 characters, the name of a StatefulSet
has 52. A label of its pods adds a hash of ten characters and may have 63. A longer name is refused, not
cut, because two releases could get one name. */}}
{{- define "tidemill.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The PriorityClass is an object of the whole cluster, so its name contains the namespace. */}}
{{- define "tidemill.priorityClass" -}}
{{- printf "%s-%s" .Release.Namespace (include "tidemill.fullname" .) -}}
{{- end -}}

{{/* Name of an object of this release: include "tidemill.name" (list $ "proxy"). */}}
{{- define "tidemill.name" -}}
{{- printf "%s-%s" (include "tidemill.fullname" (index . 0)) (index . 1) -}}
{{- end -}}

{{- define "tidemill.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .group }}
tidemill.io/broker-group: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of an object: (dict "root" $ "component" "broker" "group" "broker-0"); `more` adds labels. */}}
{{- define "tidemill.labels" -}}
{{- $own := include "tidemill.selectorLabels" . | fromYaml -}}
{{- $chart := dict
    "helm.sh/chart" (printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_"))
    "app.kubernetes.io/version" (.root.Chart.AppVersion | trunc 63)
    "app.kubernetes.io/part-of" "tidemill"
    "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $common := tpl (toYaml .root.Values.commonLabels) .root | fromYaml -}}
{{- merge $own $chart (default dict .more) $common | toYaml -}}
{{- end -}}

{{/* Labels of pods, without versions, so that a new chart restarts only changed pods. */}}
{{- define "tidemill.podLabels" -}}
{{- omit (include "tidemill.labels" . | fromYaml) "helm.sh/chart" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" | toYaml -}}
{{- end -}}

{{/* Annotations with their key, or an empty text. */}}
{{- define "tidemill.annotations" -}}
{{- $common := tpl (toYaml .root.Values.commonAnnotations) .root | fromYaml -}}
{{- $more := tpl (toYaml (default dict .more)) .root | fromYaml -}}
{{- with merge (default dict .own) $more $common -}}
annotations:
{{ toYaml . | indent 2 }}
{{- end -}}
{{- end -}}

{{- define "tidemill.metadata" -}}
name: {{ .name }}
{{- if not .isClusterWide }}
namespace: {{ .root.Release.Namespace }}
{{- end }}
labels:
{{ include "tidemill.labels" . | indent 2 }}
{{- with include "tidemill.annotations" (dict "root" .root "own" .own "more" .annotations) }}
{{ . }}
{{- end }}
{{- end -}}

{{- define "tidemill.serviceAccountName" -}}
{{- $account := .of.serviceAccount -}}
{{- if $account.name -}}{{ $account.name }}
{{- else if $account.create -}}{{ include "tidemill.name" (list .root .component) }}
{{- else -}}default
{{- end -}}
{{- end -}}

{{/* Addresses of all broker groups: host:port of the first replica of each, with commas between them. A
process has one link per group, which follows its master. */}}
{{- define "tidemill.members" -}}
{{- $root := . -}}
{{- $found := list -}}
{{- range .Values.brokerGroups -}}
{{- $service := include "tidemill.name" (list $root .name) -}}
{{- $found = append $found (printf "%s-0.%s:10911" $service $service) -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{/* The IP families of a Service. */}}
{{- define "tidemill.ipFamilies" -}}
{{- with .Values.ipFamilyPolicy }}
  ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.ipFamilies }}
  ipFamilies:
{{ toYaml . | indent 4 }}
{{- end }}
{{- end -}}

{{/* Whether a broker group has several replicas, and therefore controllers. */}}
{{- define "tidemill.groupIsReplicated" -}}
{{- if gt (int (default 1 .replicas)) 1 -}}yes{{- end -}}
{{- end -}}
{{/* The existing StatefulSet of a group; empty if there is none, or no cluster. */}}
{{- define "tidemill.standingSet" -}}
{{- $root := index . 0 -}}
{{- lookup "apps/v1" "StatefulSet" $root.Release.Namespace (include "tidemill.name" (list $root (index . 1).name)) | toJson -}}
{{- end -}}

{{/* Whether a group of one replica becomes one of several: (list $ group). */}}
{{- define "tidemill.becomesReplicated" -}}
{{- $replicated := include "tidemill.installed" (index . 0) | fromJson | dig "replicated" "" | splitList "," -}}
{{- if and (include "tidemill.standingSet" . | fromJson) (not (has (index . 1).name $replicated)) -}}yes{{- end -}}
{{- end -}}

{{/* The claim template of a group: size, class and access modes as one text; "none" without
a template. */}}
{{- define "tidemill.volume" -}}
{{- $persistence := (include "tidemill.brokerGroup" . | fromYaml).persistence -}}
{{- if $persistence.existingClaim -}}
{{- printf "none/%s" $persistence.existingClaim -}}
{{- else if $persistence.enabled -}}
{{- printf "%v/%s/%s" $persistence.size (default "default" $persistence.storageClass) (join "," $persistence.accessModes) -}}
{{- else -}}none{{- end -}}
{{- end -}}

{{/* The broker groups whose claims are smaller than the values, as JSON: a StatefulSet that is to be
replaced, or claims that are to be. */}}
{{- define "tidemill.growingGroups" -}}
{{- $root := . -}}
{{- $found := list -}}
{{- range .Values.brokerGroups -}}
{{- $persistence := (include "tidemill.brokerGroup" (list $root .) | fromYaml).persistence -}}
{{- if and $persistence.enabled (not $persistence.existingClaim) -}}
{{- $name := include "tidemill.name" (list $root .name) -}}
{{- $wanted := include "tidemill.bytes" $persistence.size | int64 -}}
{{- $standing := include "tidemill.standingSet" (list $root .) | fromJson -}}
{{- $templates := dig "spec" "volumeClaimTemplates" list $standing -}}
{{- $isSmall := false -}}
{{- range $templates -}}
{{- if lt (include "tidemill.bytes" .spec.resources.requests.storage | int64) $wanted -}}{{- $isSmall = true -}}{{- end -}}
{{- end -}}
{{- range until (int (dig "spec" "replicas" 1 $standing)) -}}
{{- with lookup "v1" "PersistentVolumeClaim" $root.Release.Namespace (printf "data-%s-%d" $name .) -}}
{{- if lt (include "tidemill.bytes" .spec.resources.requests.storage | int64) $wanted -}}{{- $isSmall = true -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if or $isSmall (lookup "v1" "ConfigMap" $root.Release.Namespace (printf "%s-saved" $name)) -}}
{{- $found = append $found (dict "group" .name "statefulSet" $name "size" (toString $persistence.size)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $found -}}{{- toJson . -}}{{- end -}}
{{- end -}}

{{/* Current maximum of replicas of a group: retiring replicas serve until the others are in sync. */}}
{{- define "tidemill.replicasMost" -}}
{{- $standing := include "tidemill.standingSet" . | fromJson -}}
{{- max (int (default 1 (index . 1).replicas)) (int (dig "spec" "replicas" 1 $standing)) -}}
{{- end -}}

{{/* The volumes of all groups for the check of a rollback: GROUP=SIZE/CLASS/MODES, with spaces between. */}}
{{- define "tidemill.volumesOfGroups" -}}
{{- $root := . -}}
{{- $found := list -}}
{{- range .Values.brokerGroups -}}
{{- $found = append $found (printf "%s=%s" .name (include "tidemill.volume" (list $root .))) -}}
{{- end -}}
{{- join " " $found -}}
{{- end -}}

{{/* The broker groups of several replicas, with commas between them. */}}
{{- define "tidemill.replicatedGroups" -}}
{{- $found := list -}}
{{- range .Values.brokerGroups -}}
{{- if include "tidemill.groupIsReplicated" . -}}{{- $found = append $found .name -}}{{- end -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{- define "tidemill.isReplicated" -}}
{{- range .Values.brokerGroups -}}{{- include "tidemill.groupIsReplicated" . -}}{{- end -}}
{{- end -}}

{{/* Addresses of the controllers: a list of host:port. */}}
{{- define "tidemill.controllers" -}}
{{- $found := list -}}
{{- range $number := until (int .Values.controller.replicas) -}}
{{- $found = append $found (printf "%s:10912" (include "tidemill.name" (list $ (printf "controller-%d" $number)))) -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* The names in the controllers' certificate. */}}
{{- define "tidemill.controllerNames" -}}
{{- $names := list -}}
{{- range $number := until (int .Values.controller.replicas) -}}
{{- $names = append $names (include "tidemill.name" (list $ (printf "controller-%d" $number))) -}}
{{- end -}}
{{- $names | toJson -}}
{{- end -}}

{{/* The processes of a release. */}}
{{- define "tidemill.components" -}}
[broker, proxy, admin{{ if include "tidemill.isReplicated" . }}, controller{{ end }}]
{{- end -}}

{{/* The DNS names of a Service: short, with the namespace, and full. */}}
{{- define "tidemill.serviceNames" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $in := printf "%s.%s" $name $root.Release.Namespace -}}
{{- list $name $in (printf "%s.svc" $in) (printf "%s.svc.%s" $in $root.Values.clusterDomain) | toJson -}}
{{- end -}}

{{/* The broker groups whose messages `helm uninstall` deletes, with commas between them. */}}
{{- define "tidemill.groupsThatGo" -}}
{{- $root := . -}}
{{- $found := list -}}
{{- range .Values.brokerGroups -}}
{{- $persistence := (include "tidemill.brokerGroup" (list $root .) | fromYaml).persistence -}}
{{- if or (not $persistence.enabled) (and (eq $persistence.whenDeleted "Delete") (not $persistence.existingClaim)) -}}
{{- $found = append $found .name -}}
{{- end -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{/* The broker group with the defaults of `broker`. */}}
{{- define "tidemill.brokerGroup" -}}
{{- $root := index . 0 -}}
{{- mergeOverwrite (deepCopy $root.Values.broker) (omit (index . 1) "config") (dict "config" (mergeOverwrite (deepCopy $root.Values.broker.config) (default dict (index . 1).config))) | toYaml -}}
{{- end -}}
