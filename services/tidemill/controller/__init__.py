"""The controller: watches over replicas, and decides which of them is master of its group."""
