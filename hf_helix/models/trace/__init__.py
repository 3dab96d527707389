"""Model families that are derived from the model itself: by tracing it, and inferring how its values are cut."""
