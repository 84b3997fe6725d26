"""The tricks: recomputation, mixed precision, clipping on any mesh, accumulation."""
