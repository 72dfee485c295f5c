"""Rollout engines that are servers: their protocols (SGLang, vLLM), faults they survive, and how weights reach them."""
