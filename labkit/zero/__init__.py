"""ZeRO: what data parallelism keeps N times over, each rank keeps an Nth of."""
