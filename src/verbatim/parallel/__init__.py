"""One model over several processes: the ranks of a group, and the backend of rank 0."""
