"""The mathematics: pure functions of matrices. Rows are samples; nothing here knows of layers or backward passes."""
