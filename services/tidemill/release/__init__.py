"""What the jobs of a Helm release do: certificates, the look before an upgrade, topics, a trial."""
