//! Metrics over HTTP/1: few clients, short requests, and none that takes its time.

use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::{AddressFamily, SocketType, sockopt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::exposition::Format;

/// Clients at one time; others wait.
const CLIENTS: usize = 16;
/// How long a client may take for its request's header.
const HEADER_TIME: Duration = Duration::from_secs(5);
/// How long a client may take for all.
const TIME: Duration = Duration::from_secs(15);
/// Bytes of a request's header at most, and its fields.
const HEADER: usize = 16 << 10;
const FIELDS: usize = 64;

/// Where clients connect.
#[derive(Debug)]
pub enum Listener {
    /// An address.
    Tcp(tokio::net::TcpListener),
    /// A file.
    Unix(tokio::net::UnixListener),
}

/// A client's connection.
pub trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

impl Listener {
    /// What systemd has made. To be called in the runtime.
    ///
    /// # Errors
    /// It is no listening stream socket.
    pub fn given(socket: OwnedFd) -> Result<Listener> {
        let is_one = sockopt::socket_acceptconn(&socket).unwrap_or(false)
            && sockopt::socket_type(&socket).is_ok_and(|kind| kind == SocketType::STREAM);
        let family = sockopt::socket_domain(&socket).context("what systemd gives is no socket")?;
        match family {
            AddressFamily::INET | AddressFamily::INET6 if is_one => {
                Listener::tcp(TcpListener::from(socket))
            }
            AddressFamily::UNIX if is_one => Listener::unix(UnixListener::from(socket)),
            _ => bail!("what systemd gives is no listening stream socket; use ListenStream="),
        }
    }

    /// For this socket. To be called in the runtime.
    ///
    /// # Errors
    /// As fcntl(2) and epoll_ctl(2).
    pub fn tcp(socket: TcpListener) -> Result<Listener> {
        socket.set_nonblocking(true).context("fcntl")?;
        let socket = tokio::net::TcpListener::from_std(socket).context("epoll")?;
        Ok(Listener::Tcp(socket))
    }

    /// Likewise.
    ///
    /// # Errors
    /// As [`Listener::tcp`].
    pub fn unix(socket: UnixListener) -> Result<Listener> {
        socket.set_nonblocking(true).context("fcntl")?;
        let socket = tokio::net::UnixListener::from_std(socket).context("epoll")?;
        Ok(Listener::Unix(socket))
    }

    async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Listener::Tcp(socket) => Box::new(socket.accept().await?.0),
            Listener::Unix(socket) => Box::new(socket.accept().await?.0),
        })
    }
}

/// What knows the metrics.
pub trait Scraped {
    /// All of them as text.
    fn scrape(&self, format: Format) -> impl Future<Output = String>;
}

/// Serves clients, without an end.
pub async fn serve(listener: Listener, scraped: Rc<impl Scraped + 'static>) -> Infallible {
    let clients = std::sync::Arc::new(Semaphore::new(CLIENTS));
    loop {
        let Ok(place) = clients.clone().acquire_owned().await else { continue };
        match listener.accept().await {
            Ok(stream) => {
                tokio::task::spawn_local(client(stream, scraped.clone(), place));
            }
            // No descriptor is left, or the client is gone already.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn client(
    stream: Box<dyn Stream>,
    scraped: Rc<impl Scraped + 'static>,
    _place: OwnedSemaphorePermit,
) {
    let service = service_fn(|request| {
        let scraped = scraped.clone();
        async move { Ok::<_, Infallible>(answer(&request, &*scraped).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(HEADER)
        .max_headers(FIELDS)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    // Whoever takes longer, or speaks another protocol, is no client.
    let _ = tokio::time::timeout(TIME, connection).await;
}

async fn answer(request: &Request<Incoming>, scraped: &impl Scraped) -> Response<Full<Bytes>> {
    let text = |status: StatusCode, text: &'static str| {
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        let plain = const { hyper::header::HeaderValue::from_static("text/plain; charset=utf-8") };
        response.headers_mut().insert(CONTENT_TYPE, plain);
        response
    };
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "GET or HEAD only\n");
        let methods = const { hyper::header::HeaderValue::from_static("GET, HEAD") };
        response.headers_mut().insert(ALLOW, methods);
        return response;
    }
    match request.uri().path() {
        "/metrics" => {
            let values = request.headers().get_all(ACCEPT).iter();
            let values: Vec<&str> = values.filter_map(|value| value.to_str().ok()).collect();
            let format = Format::accepted(&values.join(","));
            let mut response = Response::new(Full::from(scraped.scrape(format).await));
            let headers = response.headers_mut();
            let kind = hyper::header::HeaderValue::from_static(format.media_type());
            headers.insert(CONTENT_TYPE, kind);
            let fresh = const { hyper::header::HeaderValue::from_static("no-store") };
            headers.insert(CACHE_CONTROL, fresh);
            response
        }
        "/" => text(StatusCode::OK, "usmc exporter: the metrics are at /metrics\n"),
        _ => text(StatusCode::NOT_FOUND, "the metrics are at /metrics\n"),
    }
}
