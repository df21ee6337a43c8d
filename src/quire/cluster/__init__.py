"""Many replicas behind one address: which of them a request goes to. Refuses to know: torch, HTTP, how replicas run."""
