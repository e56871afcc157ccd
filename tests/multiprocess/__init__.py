"""Jobs of several processes: each test starts a real one, and checks many things in it."""
