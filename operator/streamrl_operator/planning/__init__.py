"""What should exist for a job, and what to say of it. Pure: values in, values out."""
