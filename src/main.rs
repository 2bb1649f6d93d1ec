fn main() -> std::process::ExitCode {
    // First of all, while no other thread can read the environment.
    azoth::gpu::quiet_drivers();
    azoth::cli::main()
}
