"""Numbers of topics and consumer groups: samples of all broker groups, rates and history."""
