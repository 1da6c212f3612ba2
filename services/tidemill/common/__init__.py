"""What two or more processes need; imports no other package of ours."""
