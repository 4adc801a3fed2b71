"""Plans of a run: what each stage takes on GPUs that need not be here, computed from sizes of models and data sheets."""
