"""The jobs of a Helm release: certificates, the check before an upgrade, topics, a trial."""
