{{/* The settings of the processes, as YAML for --config: the chart's settings, then those of the values. */}}

{{- define "tidemill.settings.every" -}}
{{- $root := . -}}
{{- $settings := dict "cluster" (include "tidemill.fullname" .) "log_format" "json" "metrics_host" .Values.listenAddress "metrics_port" 5557 -}}
{{- if .Values.internalTls.enabled -}}
{{- $_ := set $settings "cluster_tls_ca_file" "/etc/tidemill-tls/ca.crt" -}}
{{- $_ := set $settings "cluster_tls_certificate_file" "/etc/tidemill-tls/tls.crt" -}}
{{- $_ := set $settings "cluster_tls_key_file" "/etc/tidemill-tls/tls.key" -}}
{{- end -}}
{{- if .Values.monitoring.auth.enabled -}}
{{- $_ := set $settings "metrics_token_file" "/etc/tidemill-metrics/token" -}}
{{- end -}}
{{- mergeOverwrite $settings (deepCopy .Values.config) | toYaml -}}
{{- end -}}

{{- define "tidemill.settings.broker" -}}
{{- $root := index . 0 -}}
{{- $group := index . 1 -}}
{{- $settings := include "tidemill.settings.every" $root | fromYaml -}}
{{- $own := dict "name" $group.name "data_dir" "/data/store" "data_dir_wait_ms" 60000 "grpc_host" $root.Values.listenAddress "grpc_port" 10911 -}}
{{- if not $root.Values.internalTls.enabled -}}
{{- $_ := set $own "plain_links" true -}}
{{- end -}}
{{- with $root.Values.featureLevelMax -}}
{{- $_ := set $own "feature_level_max" (int .) -}}
{{- end -}}
{{- if and $root.Values.pipeline.enabled $root.Values.pipeline.gate -}}
{{- $_ := set $own "archive_gate_group" $root.Values.pipeline.gate -}}
{{- end -}}
{{- if include "tidemill.groupIsReplicated" $group -}}
{{- $_ := set $own "controllers" (include "tidemill.controllers" $root | fromJsonArray) -}}
{{- end -}}
{{- mergeOverwrite $settings $own $group.config | toYaml -}}
{{- end -}}

{{- define "tidemill.settings.proxy" -}}
{{- $settings := include "tidemill.settings.every" . | fromYaml -}}
{{- $service := printf "%s.%s.svc.%s:%v" (include "tidemill.name" (list . "proxy")) .Release.Namespace .Values.clusterDomain .Values.proxy.service.port -}}
{{- $own := dict "name" "proxy" "grpc_host" .Values.listenAddress "grpc_port" 8081 "advertised_address" (default $service .Values.proxy.advertisedAddress) -}}
{{- with dig "limits" "memory" "" (default dict .Values.proxy.resources) -}}
{{- $half := div (include "tidemill.bytes" . | int64) 2 -}}
{{- if and (lt $half 134217728) (not (hasKey $.Values.proxy.config "memory_bytes_max")) -}}
{{- fail (printf "proxy.resources.limits.memory is %s: a proxy uses half of it for its clients, which requires a limit of at least 256Mi; raise it, or set proxy.config.memory_bytes_max" .) -}}
{{- end -}}
{{- $_ := set $own "memory_bytes_max" $half -}}
{{- end -}}
{{- $_ := set $own "pipeline_source" .Values.pipeline.enabled -}}
{{- $own = merge $own (include "tidemill.settings.security" . | fromYaml) -}}
{{- if ne .Values.proxy.tls.mode "off" -}}
{{- $_ := set $own "tls" .Values.proxy.tls.mode -}}
{{- $_ := set $own "tls_certificate_file" "/etc/tidemill-client-tls/tls.crt" -}}
{{- $_ := set $own "tls_key_file" "/etc/tidemill-client-tls/tls.key" -}}
{{- if .Values.proxy.tls.clientCertificates -}}
{{- $_ := set $own "tls_client_ca_file" "/etc/tidemill-client-tls/ca.crt" -}}
{{- end -}}
{{- end -}}
{{- if include "tidemill.isReplicated" . -}}
{{- $_ := set $own "controllers" (include "tidemill.controllers" . | fromJsonArray) -}}
{{- /* Known masters, for a start of the container without controllers. The containers of a pod share
/dev/shm, which is in memory and outlives a container. `kubectl drain` refuses pods with an emptyDir. */ -}}
{{- $_ := set $own "routes_file" "/dev/shm/tidemill-routes.json" -}}
{{- end -}}
{{- mergeOverwrite $settings $own (deepCopy .Values.proxy.config) | toYaml -}}
{{- end -}}

{{- define "tidemill.settings.admin" -}}
{{- $settings := include "tidemill.settings.every" . | fromYaml -}}
{{- $hosts := concat (include "tidemill.serviceNames" (list . (include "tidemill.name" (list . "admin"))) | fromJsonArray) .Values.admin.hosts -}}
{{- if .Values.admin.ingress.enabled -}}
{{- $hosts = concat $hosts .Values.admin.ingress.hosts -}}
{{- end -}}
{{- $own := dict "name" "admin" "host" .Values.listenAddress "port" 8080 "admin_hosts" ($hosts | uniq) -}}
{{- $own = merge $own (include "tidemill.settings.security" . | fromYaml) -}}
{{- if include "tidemill.hasUsers" . -}}
{{- $_ := set $own "security_bootstrap_file" "/etc/tidemill-user/tidemill/credentials" -}}
{{- end -}}
{{- if include "tidemill.hasJobUsers" . -}}
{{- $_ := set $own "security_job_users_dir" "/etc/tidemill-job-users" -}}
{{- end -}}
{{- if .Values.admin.auth.enabled -}}
{{- $_ := set $own "admin_token_file" (printf "/etc/tidemill-admin-token/%s" .Values.admin.auth.key) -}}
{{- else if ne (include "tidemill.securityMode" .) "on" -}}
{{- $_ := set $own "admin_open" true -}}
{{- end -}}
{{- if .Values.admin.tls.enabled -}}
{{- $folder := ternary "/etc/tidemill-admin-tls" "/etc/tidemill-tls" (ne .Values.admin.tls.existingSecret "") -}}
{{- $_ := set $own "admin_tls_certificate_file" (printf "%s/tls.crt" $folder) -}}
{{- $_ := set $own "admin_tls_key_file" (printf "%s/tls.key" $folder) -}}
{{- else -}}
{{- $_ := set $own "admin_plain" true -}}
{{- end -}}
{{- if .Values.admin.grpc.enabled -}}
{{- $_ := set $own "admin_grpc_port" 8082 -}}
{{- end -}}
{{- if .Values.admin.scaler.enabled -}}
{{- $_ := set $own "scaler_host" .Values.listenAddress -}}
{{- $_ := set $own "scaler_port" 9090 -}}
{{- if not .Values.admin.config.scaler_tls_client_ca_file -}}
{{- /* A NetworkPolicy admits only admin.scaler.from. */ -}}
{{- $_ := set $own "scaler_open" true -}}
{{- end -}}
{{- end -}}
{{- if include "tidemill.isReplicated" . -}}
{{- $_ := set $own "controllers" (include "tidemill.controllers" . | fromJsonArray) -}}
{{- end -}}
{{- mergeOverwrite $settings $own (deepCopy .Values.admin.config) | toYaml -}}
{{- end -}}

{{/* The settings of proxies and of the admin process about users. */}}
{{- define "tidemill.settings.security" -}}
{{- if include "tidemill.hasUsers" . -}}
{{- $own := dict "security_floor" (include "tidemill.securityMode" .) "security_key_file" "/etc/tidemill-security/keys" -}}
{{- with .Values.security.oidc -}}
{{- if .enabled -}}
{{- $own = merge $own (dict "oidc_issuer" .issuer "oidc_audience" .audience "oidc_keys" (default "https://kubernetes.default.svc/openid/v1/jwks" .keys)) -}}
{{- end -}}
{{- end -}}
{{- if include "tidemill.asksApiServer" . -}}
{{- $own = merge $own (dict "oidc_ca_file" "/etc/tidemill-issuer/ca.crt" "oidc_token_file" "/etc/tidemill-issuer/token") -}}
{{- end -}}
{{- $own | toYaml -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{- define "tidemill.settings.controller" -}}
{{- $settings := include "tidemill.settings.every" . | fromYaml -}}
{{- $own := dict "grpc_host" .Values.listenAddress "grpc_port" 10912 "kubernetes_groups" true -}}
{{- if not .Values.internalTls.enabled -}}
{{- $_ := set $own "plain_links" true -}}
{{- end -}}
{{- with .Values.featureLevelMax -}}
{{- $_ := set $own "feature_level_max" (int .) -}}
{{- end -}}
{{- mergeOverwrite $settings $own (deepCopy .Values.controller.config) | toYaml -}}
{{- end -}}

{{/* The store format of a feature level: 1010 for level 1, the format of chart 0.1.0. */}}
{{- define "tidemill.storeFormat" -}}
{{- add (mul 1000 (int .)) 10 -}}
{{- end -}}
