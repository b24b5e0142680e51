"""Where a trainer and a sampler meet: published policies, their probes, the directory of a run."""
