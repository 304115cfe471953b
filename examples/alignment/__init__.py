"""The main job: align frozen vision and audio encoders with a frozen language model."""
