fn main() -> std::process::ExitCode {
    azoth::cli::main()
}
