{{/* The jobs of a release: pods that run once. */}}

{{/* Whether the chart's own job makes Secrets: certificates, or the token of the REST API. */}}
{{- define "tidemill.makesCertificates" -}}
{{- if and .Values.internalTls.enabled (not .Values.internalTls.existingSecret) (not .Values.internalTls.certManager.enabled) -}}yes{{- end -}}
{{- end -}}
{{/* The longest time between two runs of a cron schedule in days, from its rarest field. */}}
{{- define "tidemill.daysBetweenRuns" -}}
{{- if hasPrefix "@" . -}}
{{- get (dict "@hourly" "1" "@daily" "1" "@midnight" "1" "@weekly" "7" "@monthly" "31") . | default "366" -}}
{{- else -}}
{{- $fields := regexSplit " +" (trim .) -1 -}}
{{- $day := index $fields 2 | replace "?" "*" -}}
{{- $weekday := index $fields 4 | replace "?" "*" -}}
{{- if ne (index $fields 3) "*" -}}366
{{- else if ne $weekday "*" -}}7
{{- else if eq $day "*" -}}1
{{- else if hasPrefix "*/" $day -}}{{ trimPrefix "*/" $day }}
{{- else -}}31
{{- end -}}
{{- end -}}
{{- end -}}
{{- define "tidemill.makesToken" -}}
{{- if and .Values.admin.replicas .Values.admin.auth.enabled (not .Values.admin.auth.existingSecret) -}}yes{{- end -}}
{{- end -}}
{{- define "tidemill.makesMetricsToken" -}}
{{- if and .Values.monitoring.auth.enabled (not .Values.monitoring.auth.existingSecret) -}}yes{{- end -}}
{{- end -}}
{{- define "tidemill.makesUsers" -}}
{{- if and (include "tidemill.hasUsers" .) (not (and .Values.security.existingKeySecret .Values.security.existingAdminSecret (or .Values.security.existingJobUsersSecret (not (include "tidemill.hasJobUsers" .))))) -}}yes{{- end -}}
{{- end -}}

{{/* Whether jobs have users with few rights. In the other modes, the REST API accepts its token alone. */}}
{{- define "tidemill.hasJobUsers" -}}
{{- if and .Values.admin.replicas (eq (include "tidemill.securityMode" .) "on") -}}yes{{- end -}}
{{- end -}}

{{/* Whether the admin process of the installed release has users of jobs. Before an upgrade from a
release without them, a job has the token. Without a cluster, they count as present. */}}
{{- define "tidemill.jobUsersStand" -}}
{{- $recorded := include "tidemill.installed" . | fromJson -}}
{{- if and (include "tidemill.hasJobUsers" .) (or (not $recorded) (eq (dig "job-users" "" $recorded) "yes")) -}}yes{{- end -}}
{{- end -}}

{{/* The Secret with the secrets of the users of jobs, one key for each job. */}}
{{- define "tidemill.jobUsersSecret" -}}
{{- default (include "tidemill.name" (list . "job-users")) .Values.security.existingJobUsersSecret -}}
{{- end -}}

{{/* The jobs that call the REST API, as their users are named. */}}
{{- define "tidemill.jobsWithUsers" -}}
["check", "provision", "roll", "trial", "volumes"]
{{- end -}}
{{- define "tidemill.makesSecrets" -}}
{{- include "tidemill.makesCertificates" . }}{{ include "tidemill.makesToken" . }}{{ include "tidemill.makesMetricsToken" . }}{{ include "tidemill.makesUsers" . -}}
{{- end -}}

{{/* The state that the last installation, upgrade or rollback recorded, as JSON; empty without a cluster. */}}
{{- define "tidemill.installed" -}}
{{- if not (hasKey . "installedState") -}}
{{- $found := lookup "v1" "ConfigMap" .Release.Namespace (include "tidemill.name" (list . "claims-stay")) -}}
{{- $_ := set . "installedState" (dig "data" dict (default dict $found) | toJson) -}}
{{- end -}}
{{- .installedState -}}
{{- end -}}

{{/* The events of the job that makes Secrets. An upgrade needs none if the recorded release had the same
plan, because its job has succeeded: Kubernetes got the record afterwards. The Secrets must still exist,
because an operator deletes them to replace a key that has leaked. */}}
{{- define "tidemill.setupEvents" -}}
{{- if not (hasKey . "eventsOfSetup") -}}
{{- $plan := include "tidemill.certificatesPlan" . -}}
{{- $isNeeded := ne ($plan | sha256sum) (include "tidemill.installed" . | fromJson | dig "secrets" "") -}}
{{- $wanted := fromJson $plan -}}
{{- range concat (list $wanted.authority) (keys $wanted.certificates) (keys $wanted.tokens) (keys $wanted.keyFiles) $wanted.administrators (keys $wanted.jobUsers) -}}
{{- if not $isNeeded -}}
{{- $isNeeded = not (lookup "v1" "Secret" $.Release.Namespace .) -}}
{{- end -}}
{{- end -}}
{{- $_ := set . "eventsOfSetup" (printf "pre-install,%spre-rollback" (ternary "pre-upgrade," "" $isNeeded)) -}}
{{- end -}}
{{- .eventsOfSetup -}}
{{- end -}}

{{/* The events of the check. An upgrade needs none if the recorded release had the same broker groups. */}}
{{- define "tidemill.checkEvents" -}}
{{- $recorded := include "tidemill.installed" . | fromJson -}}
{{- $wanted := dict "broker-groups" (include "tidemill.groupNames" .) "replicated" (include "tidemill.replicatedGroups" .) "volumes" (include "tidemill.volumesOfGroups" .) -}}
{{- $isNeeded := ne (include "tidemill.goneGroups" .) "" -}}
{{- range $key, $value := $wanted -}}
{{- if ne $value (dig $key "unknown" $recorded) -}}{{- $isNeeded = true -}}{{- end -}}
{{- end -}}
{{ if $isNeeded }}pre-upgrade,{{ end }}pre-rollback
{{- end -}}

{{/* The accounts of the job before an installation, deleted with it, and of the job that renews. */}}
{{- define "tidemill.certificatesAccounts" -}}
{{ include "tidemill.name" (list . "certificates-setup") }}:
  helm.sh/hook: {{ include "tidemill.setupEvents" . }}
  helm.sh/hook-weight: "-20"
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{ include "tidemill.name" (list . "certificates") }}: {}
{{- end -}}

{{/* The broker groups of one replica, as a list. Controllers replace the pods of the others. */}}
{{- define "tidemill.groupsOfOne" -}}
{{- $found := list -}}
{{- range .Values.brokerGroups -}}
{{- if not (include "tidemill.groupIsReplicated" .) -}}{{- $found = append $found (include "tidemill.name" (list $ .name)) -}}{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* Whether a job replaces the pods of those groups one after the other. */}}
{{- define "tidemill.rollsInTurn" -}}
{{- if and (gt (len (include "tidemill.groupsOfOne" . | fromJsonArray)) 1) .Values.admin.replicas .Values.jobs.rollBrokerGroupsInTurn -}}yes{{- end -}}
{{- end -}}

{{/* The names in a broker's certificate. */}}
{{- define "tidemill.brokerNames" -}}
{{- $service := include "tidemill.name" (list (index . 0) (index . 1).name) -}}
{{- $names := list -}}
{{- range $ordinal := until (int (include "tidemill.replicasMost" .)) -}}
{{- $names = append $names (printf "%s-%d.%s" $service $ordinal $service) -}}
{{- end -}}
{{- $names | toJson -}}
{{- end -}}

{{/* The names of the admin process; the command line in its pod uses localhost. */}}
{{- define "tidemill.adminNames" -}}
{{- append (include "tidemill.serviceNames" (list . (include "tidemill.name" (list . "admin"))) | fromJsonArray) "localhost" | toJson -}}
{{- end -}}

{{/* The arguments of `tidemill release certificates`. */}}
{{- define "tidemill.certificatesPlan" -}}
{{- $root := . -}}
{{- $certificates := dict -}}
{{- $tokens := dict -}}
{{- if include "tidemill.makesCertificates" . -}}
{{- range .Values.brokerGroups -}}
{{- $_ := set $certificates (include "tidemill.internalSecret" (list $root .name)) (include "tidemill.brokerNames" (list $root .) | fromJsonArray) -}}
{{- end -}}
{{- $_ := set $certificates (include "tidemill.internalSecret" (list . "proxy")) (list (include "tidemill.name" (list . "proxy"))) -}}
{{- $_ := set $certificates (include "tidemill.internalSecret" (list . "admin")) (include "tidemill.adminNames" . | fromJsonArray) -}}
{{- if include "tidemill.isReplicated" . -}}
{{- $_ := set $certificates (include "tidemill.internalSecret" (list . "controller")) (include "tidemill.controllerNames" . | fromJsonArray) -}}
{{- end -}}
{{- end -}}
{{- if include "tidemill.makesToken" . -}}
{{- $_ := set $tokens (include "tidemill.name" (list . "admin-token")) .Values.admin.auth.key -}}
{{- end -}}
{{- if include "tidemill.makesMetricsToken" . -}}
{{- $_ := set $tokens (include "tidemill.metricsSecret" .) .Values.monitoring.auth.key -}}
{{- end -}}
{{- $keyFiles := dict -}}
{{- $administrators := list -}}
{{- if include "tidemill.makesUsers" . -}}
{{- if not .Values.security.existingKeySecret -}}
{{- $_ := set $keyFiles (include "tidemill.keySecret" .) (int .Values.security.keyRotation) -}}
{{- end -}}
{{- if not .Values.security.existingAdminSecret -}}
{{- $administrators = append $administrators (include "tidemill.adminUserSecret" .) -}}
{{- end -}}
{{- end -}}
{{- $jobUsers := dict -}}
{{- if and (include "tidemill.hasJobUsers" .) (not .Values.security.existingJobUsersSecret) -}}
{{- $_ := set $jobUsers (include "tidemill.jobUsersSecret" .) (include "tidemill.jobsWithUsers" . | fromJsonArray) -}}
{{- end -}}
{{- $labels := omit (include "tidemill.labels" (dict "root" . "component" "certificates") | fromYaml) "helm.sh/chart" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" -}}
{{- dict
    "authority" (include "tidemill.name" (list . "ca"))
    "certificates" $certificates
    "tokens" $tokens
    "keyFiles" $keyFiles
    "administrators" $administrators
    "jobUsers" $jobUsers
    "labels" $labels
    "days" .Values.internalTls.job.days
    "authorityDays" .Values.internalTls.job.authorityDays | toJson -}}
{{- end -}}

{{/* When Kubernetes deletes a finished job: (list $ 2), where 2 is the indentation. */}}
{{- define "tidemill.jobTtl" -}}
{{- $indentation := index . 1 | int -}}
{{- with (index . 0).Values.jobs.ttlSecondsAfterFinished -}}
{{- printf "ttlSecondsAfterFinished: %d" (int .) | nindent $indentation -}}
{{- end -}}
{{- end -}}

{{/* The pod of a job: (dict "root" $ "name" "provision" "args" list "admin" bool "user" job "account" name "token" bool ...).
With `admin` it calls the REST API: as the user of `user`, or else with the token. */}}
{{- define "tidemill.jobPod" -}}
{{- $root := .root -}}
{{- $user := default "" .user -}}
{{- $hasToken := and .admin $root.Values.admin.auth.enabled (not $user) -}}
{{- $of := merge (dict "image" $root.Values.admin.image "serviceAccount" (dict "name" .account)) $root.Values.jobs -}}
{{- $with := dict "root" $root "of" $of "component" .name "process" "admin" "token" .token -}}
metadata:
  labels:
{{ include "tidemill.podLabels" (dict "root" $root "component" .name "more" $root.Values.jobs.podLabels) | indent 4 }}
{{- with include "tidemill.annotations" (dict "root" $root "own" .annotations "more" $root.Values.jobs.podAnnotations) }}
{{ . | indent 2 }}
{{- end }}
spec:
{{ include "tidemill.pod" $with | indent 2 }}
  restartPolicy: Never
  containers:
    - name: {{ .name }}
{{ include "tidemill.container" $with | indent 6 }}
      args:
{{ toYaml .args | indent 8 }}
{{- if .admin }}
      env:
        - name: TIDEMILL_ADMIN
          value: {{ include "tidemill.adminUrl" $root }}
{{- if $user }}
        - name: TIDEMILL_USER
          value: tidemill-job-{{ $user }}
        - name: TIDEMILL_SECRET_FILE
          value: /etc/tidemill-user/secret
{{- if not $root.Values.admin.tls.enabled }}
        # The REST API of this release has no TLS (admin.tls), and the secret stays in the cluster.
        - name: TIDEMILL_ADMIN_PLAIN_TOKEN
          value: "true"
{{- end }}
{{- else if $hasToken }}
        - name: TIDEMILL_ADMIN_TOKEN_FILE
          value: /etc/tidemill-admin-token/{{ $root.Values.admin.auth.key }}
{{- end }}
{{- if $root.Values.admin.tls.enabled }}
        - name: TIDEMILL_ADMIN_CA_FILE
          value: /etc/tidemill-admin-tls/ca.crt
{{- end }}
{{- end }}
{{- $mounts := default list .mounts }}
{{- $volumes := default list .volumes }}
{{- if $user }}
{{- $mounts = append $mounts (dict "name" "user" "mountPath" "/etc/tidemill-user" "readOnly" true) }}
{{- $volumes = append $volumes (dict "name" "user" "secret" (dict "secretName" (include "tidemill.jobUsersSecret" $root) "defaultMode" 288 "items" (list (dict "key" $user "path" "secret")))) }}
{{- end }}
{{- if $hasToken }}
{{- $mounts = append $mounts (dict "name" "token" "mountPath" "/etc/tidemill-admin-token" "readOnly" true) }}
{{- $secret := default (include "tidemill.name" (list $root "admin-token")) $root.Values.admin.auth.existingSecret }}
{{- $volumes = append $volumes (dict "name" "token" "secret" (dict "secretName" $secret "defaultMode" 288)) }}
{{- end }}
{{- if and .admin $root.Values.admin.tls.enabled }}
{{- $mounts = append $mounts (dict "name" "admin-tls" "mountPath" "/etc/tidemill-admin-tls" "readOnly" true) }}
{{- $secret := default (include "tidemill.internalSecret" (list $root "admin")) $root.Values.admin.tls.existingSecret }}
{{- $volumes = append $volumes (dict "name" "admin-tls" "secret" (dict "secretName" $secret "defaultMode" 288 "items" (list (dict "key" "ca.crt" "path" "ca.crt")) "optional" (ne $root.Values.admin.tls.existingSecret ""))) }}
{{- end }}
{{- with $mounts }}
      volumeMounts:
{{ toYaml . | indent 8 }}
{{- end }}
{{- with $volumes }}
  volumes:
{{ toYaml . | indent 4 }}
{{- end }}
{{- end -}}

{{- define "tidemill.adminUrl" -}}
{{ .Values.admin.tls.enabled | ternary "https" "http" }}://{{ include "tidemill.name" (list . "admin") }}:{{ .Values.admin.service.port }}
{{- end -}}

{{/* The names of the broker groups, with commas between them. */}}
{{- define "tidemill.groupNames" -}}
{{- $names := list -}}
{{- range .Values.brokerGroups -}}{{- $names = append $names .name -}}{{- end -}}
{{- join "," $names -}}
{{- end -}}

{{/* Broker groups that exist in the cluster and are missing in the values, with commas between them. */}}
{{- define "tidemill.goneGroups" -}}
{{- $root := . -}}
{{- $kept := list -}}
{{- range .Values.brokerGroups -}}{{- $kept = append $kept .name -}}{{- end -}}
{{- $gone := list -}}
{{- range (lookup "apps/v1" "StatefulSet" .Release.Namespace "").items -}}
{{- $labels := default dict .metadata.labels -}}
{{- $group := get $labels "tidemill.io/broker-group" -}}
{{- if and $group (eq (get $labels "app.kubernetes.io/instance") $root.Release.Name) -}}
{{- $name := include "tidemill.name" (list $root $group) -}}
{{- if not (has $group $kept) -}}
{{- $gone = append $gone $group -}}
{{- else if ne .metadata.name $name -}}
{{- fail (printf "the broker group %s of this release is the StatefulSet %s, and the new name is %s, which would be an empty StatefulSet. Use the previous fullnameOverride and nameOverride; for another name, restore into a new release (docs/kubernetes/backup-and-restore.md)" $group .metadata.name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- join "," $gone -}}
{{- end -}}
