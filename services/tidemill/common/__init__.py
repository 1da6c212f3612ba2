"""Code that two or more processes share; it imports no other package of Tidemill."""
