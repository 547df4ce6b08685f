"""What users choose: settings, layers, parameter groups; all of it checked."""
