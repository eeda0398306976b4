"""What registers Gnomon with its neighbours."""
